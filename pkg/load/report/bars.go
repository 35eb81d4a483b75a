package report

import (
	"errors"
	"fmt"
	"strings"
)

// Bars is a chart of horizontal bars, of one value each, or of several, stacked.
type Bars struct {
	Title, Note string
	Value       Axis     // Linear
	Parts       []string // names of the parts, where there are several
	Rows        []Bar
}

// Bar is one bar. Where Low and High differ they are the spread of its sum;
// Bound, if it is not nil, is a value that it is held against.
type Bar struct {
	Label     string
	Values    []float64 // one for each part
	Low, High float64
	Bound     *float64
}

func (b Bar) sum() (sum float64) {
	for _, v := range b.Values {
		sum += v
	}
	return sum
}

func (b Bars) text() (title, note string) { return b.Title, b.Note }

const barHeight, barGap = 20.0, 12.0

func (b Bars) draw(id string) (string, Table, error) {
	if len(b.Rows) == 0 {
		return "", Table{}, errors.New("it has no bars")
	}
	if b.Value.Scale != Linear {
		return "", Table{}, errors.New("bars begin at 0, so their scale is linear")
	}
	left, right, values := 60.0, width-70, []float64{}
	for _, row := range b.Rows {
		if len(row.Values) != max(len(b.Parts), 1) {
			return "", Table{}, fmt.Errorf("bar %q has %d parts, not %d", row.Label, len(row.Values), max(len(b.Parts), 1))
		}
		for _, v := range row.Values {
			if v < 0 {
				return "", Table{}, fmt.Errorf("bar %q: %g is below 0", row.Label, v)
			}
		}
		left = max(left, textWidth(row.Label)*1.1+12) // in letters of 13 pixels
		values = append(values, row.sum(), row.High)
		if row.Bound != nil {
			values = append(values, *row.Bound)
			right = width - 160 // it is written beside the bar
		}
	}
	left = min(left, width/2)
	top := 4.0
	c := &canvas{}
	if len(b.Parts) > 1 {
		var of []int
		for part := range b.Parts {
			of = append(of, part%colours)
		}
		top += c.legend(0, b.Parts, of) + 4
	}
	x, err := fit(b.Value, values, left, right, 5)
	if err != nil {
		return "", Table{}, err
	}
	bottom := top + float64(len(b.Rows))*(barHeight+barGap)
	for _, tick := range x.ticks {
		at, _ := x.at(tick)
		c.line("cg", at, top, at, bottom)
		c.label("cs", "middle", at, bottom+16, b.Value.Unit.format(tick))
	}
	c.line("ca", left, top, left, bottom)
	c.label("cs", "middle", (x.from+x.to)/2, bottom+34, b.Value.Label)
	for i, row := range b.Rows {
		b.bar(c, row, x, top+float64(i)*(barHeight+barGap)+barGap/2)
	}
	return c.drawing(id, b.Title, b.about(), bottom+42), b.table(), nil
}

func (b Bars) bar(c *canvas, row Bar, x *axis, y float64) {
	c.label("ct", "end", x.from-8, y+barHeight-5, row.Label)
	sum := 0.0
	end := x.from
	for part, v := range row.Values {
		from, _ := x.at(sum)
		sum += v
		to, _ := x.at(sum)
		tip := row.Label
		if len(b.Parts) > 1 {
			tip += ", " + b.Parts[part]
		}
		text := b.Value.Unit.format(v)
		gap := 0.0
		if part < len(row.Values)-1 && to-from > 2 {
			gap = 1 // keeps the parts apart
		}
		c.bar(fill(part%colours), from, y, to-from-gap, barHeight, tip+": "+text+b.between(row))
		if len(b.Parts) > 1 && to-from > textWidth(text)+6 {
			c.label("ci", "middle", (from+to)/2, y+barHeight-6, text)
		}
		end = to
	}
	text := b.Value.Unit.format(sum)
	if row.Low != row.High {
		low, _ := x.at(row.Low)
		high, _ := x.at(row.High)
		c.line("cr", low, y+barHeight/2, high, y+barHeight/2)
		c.line("cr", low, y+5, low, y+barHeight-5)
		c.line("cr", high, y+5, high, y+barHeight-5)
		end = max(end, high)
	}
	if row.Bound != nil {
		at, _ := x.at(*row.Bound)
		c.line("cb", at, y-4, at, y+barHeight+4)
		end = max(end, at)
		text += ", bound " + b.Value.Unit.format(*row.Bound)
	}
	c.label("cv", "start", end+7, y+barHeight-5, text)
}

func (b Bars) between(row Bar) string {
	if row.Low == row.High {
		return ""
	}
	return fmt.Sprintf(" (%s to %s in all)", b.Value.Unit.format(row.Low), b.Value.Unit.format(row.High))
}

// about tells in words what is drawn.
func (b Bars) about() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s.", b.Value.Label)
	for _, row := range b.Rows {
		fmt.Fprintf(&text, " %s: %s.", row.Label, b.Value.Unit.format(row.sum()))
	}
	return text.String()
}

// table holds the figures.
func (b Bars) table() Table {
	t := Table{Columns: []Column{{Name: ""}}}
	if len(b.Parts) > 1 {
		for _, part := range b.Parts {
			t.Columns = append(t.Columns, Column{part, true})
		}
	}
	t.Columns = append(t.Columns, Column{b.Value.Label, true}, Column{"spread", true}, Column{"bound", true})
	for _, row := range b.Rows {
		cells := Cells(row.Label)
		if len(b.Parts) > 1 {
			for _, v := range row.Values {
				cells = append(cells, Cell{Text: b.Value.Unit.format(v)})
			}
		}
		between, bound := "", ""
		if row.Low != row.High {
			between = b.Value.Unit.format(row.Low) + " – " + b.Value.Unit.format(row.High)
		}
		if row.Bound != nil {
			bound = b.Value.Unit.format(*row.Bound)
		}
		t.Rows = append(t.Rows, append(cells, Cells(b.Value.Unit.format(row.sum()), between, bound)...))
	}
	return t
}
