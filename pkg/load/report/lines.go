package report

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Lines is a chart of one or more series over a common axis.
type Lines struct {
	Title, Note string
	X, Y        Axis
	Series      []Series
	Bounds      []Bound
}

// Series is a line with a name.
type Series struct {
	Name   string
	Points []Point // in the order of X
	Dashed bool    // something to compare with, as an ideal
	Area   bool    // the ground under it is filled
}

// Point is a point. Where Low and High differ they are its spread.
type Point struct{ X, Y, Low, High float64 }

// Bound is a value of Y that should not be crossed, or one to know.
type Bound struct {
	Label string
	Value float64
}

const (
	linesHeight = 340.0
	// hoverPoints bounds the points of a series that can be pointed at.
	hoverPoints = 240
	// Series with more points than this are drawn without dots.
	dottedPoints = 30
)

func (l Lines) text() (title, note string) { return l.Title, l.Note }

func (l Lines) draw(id string) (string, Table, error) {
	var xs, ys []float64
	var names []string
	for _, s := range l.Series {
		names = append(names, s.Name)
		for _, p := range s.Points {
			xs, ys = append(xs, p.X), append(ys, p.Y)
			if p.Low != p.High {
				ys = append(ys, p.Low, p.High)
			}
		}
	}
	for _, b := range l.Bounds {
		ys = append(ys, b.Value)
	}
	if len(xs) == 0 {
		return "", Table{}, errors.New("it has no points")
	}

	c := &canvas{}
	top := 4.0
	if len(names) > 1 {
		top = c.legend(0, names, l.colours()) + 14
	}
	top += lineHeight + 6 // for the label of the axis
	right := width - 12
	for _, name := range names {
		right = min(right, width-14-textWidth(name))
	}
	right = max(right, width*0.7)
	y, err := fit(l.Y, ys, linesHeight-44, top, 5)
	if err != nil {
		return "", Table{}, err
	}
	left := 12.0
	for _, tick := range y.ticks {
		left = max(left, textWidth(l.Y.Unit.format(tick))+14)
	}
	x, err := fit(l.X, xs, left, right, 7)
	if err != nil {
		return "", Table{}, err
	}
	if l.X.Scale == Linear {
		// Lines go from edge to edge; only values need room to the next tick.
		x.low, x.high = min(slices.Min(xs), x.high), max(slices.Max(xs), x.low)
		if x.low > 0 && x.low < (x.high-x.low)/2 {
			x.low = 0
		}
		if x.low == x.high {
			x.low, x.high = x.low-1, x.high+1
		}
		x.ticks = slices.DeleteFunc(x.ticks, func(t float64) bool {
			slack := (x.high - x.low) * 1e-9
			return t < x.low-slack || t > x.high+slack
		})
	}
	l.frame(c, x, y)
	for i, colour := range l.colours() {
		l.series(c, colour, l.Series[i], x, y)
	}
	l.ends(c, x, y)
	return c.drawing(id, l.Title, l.about(names), linesHeight), l.table(), nil
}

// colours are those of the series: what is dashed is grey.
func (l Lines) colours() []int {
	of, next := make([]int, len(l.Series)), 0
	for i, s := range l.Series {
		if of[i] = grey; !s.Dashed {
			of[i] = next % colours
			next++
		}
	}
	return of
}

// about tells in words what is drawn.
func (l Lines) about(names []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s over %s.", l.Y.Label, l.X.Label)
	for i, s := range l.Series {
		if len(s.Points) == 0 {
			continue
		}
		last := s.Points[len(s.Points)-1]
		fmt.Fprintf(&b, " %s: %d points, the last %s at %s.", names[i], len(s.Points), l.Y.Unit.format(last.Y), l.X.Unit.format(last.X))
	}
	return b.String()
}

// frame draws grid, ticks, labels and bounds.
func (l Lines) frame(c *canvas, x, y *axis) {
	for _, tick := range y.ticks {
		at, _ := y.at(tick)
		c.line("cg", x.from, at, x.to, at)
		c.label("cs", "end", x.from-8, at+4, l.Y.Unit.format(tick))
	}
	c.line("ca", x.from, y.from, x.to, y.from)
	last := math.Inf(-1)
	for _, tick := range x.ticks {
		at, _ := x.at(tick)
		c.line("ca", at, y.from, at, y.from+4)
		text := l.X.Unit.format(tick)
		if at-textWidth(text)/2 < last+6 {
			continue // it would lie on the one before
		}
		c.label("cs", "middle", at, y.from+18, text)
		last = at + textWidth(text)/2
	}
	c.label("cs", "start", 0, y.to-14, l.Y.Label)
	c.label("cs", "middle", (x.from+x.to)/2, linesHeight-6, l.X.Label)
	for _, b := range l.Bounds {
		if at, ok := y.at(b.Value); ok {
			c.line("cb", x.from, at, x.to, at)
			beside := at - 5
			if at < y.to+lineHeight { // the label of the axis is there
				beside = at + 13
			}
			c.label("cs", "start", x.from+6, beside, b.Label+" "+l.Y.Unit.format(b.Value))
		}
	}
}

func (l Lines) series(c *canvas, colour int, s Series, x, y *axis) {
	var path, spreads strings.Builder
	firstX, lastX, pen := 0.0, 0.0, "M"
	for _, p := range s.Points {
		px, okX := x.at(p.X)
		py, okY := y.at(p.Y)
		if !okX || !okY {
			pen = "M" // a gap
			continue
		}
		if path.Len() == 0 {
			firstX = px
		}
		lastX = px
		path.WriteString(pen + num(px) + " " + num(py))
		pen = "L"
		low, okLow := y.at(p.Low)
		high, okHigh := y.at(p.High)
		if p.Low != p.High && okLow && okHigh {
			fmt.Fprintf(&spreads, "M%s %sV%s", num(px), num(low), num(high))
		}
	}
	if path.Len() == 0 {
		return
	}
	if s.Area {
		fmt.Fprintf(c, `<path class="cf %s" d="%sL%s %sL%s %sZ"/>`, fill(colour), path.String(), num(lastX), num(y.from), num(firstX), num(y.from))
	}
	class := "cl " + stroke(colour)
	if s.Dashed {
		class += " cd"
	}
	fmt.Fprintf(c, `<path class="%s" d="%s"/>`, class, path.String())
	if spreads.Len() > 0 {
		fmt.Fprintf(c, `<path class="cl cw %s" d="%s"/>`, stroke(colour), spreads.String())
	}
	r := 3.0
	if s.Dashed || len(s.Points) > dottedPoints {
		r = 0
	}
	every := max((len(s.Points)+hoverPoints-1)/hoverPoints, 1)
	for j := 0; j < len(s.Points); j += every {
		p := s.Points[j]
		px, okX := x.at(p.X)
		py, okY := y.at(p.Y)
		if okX && okY {
			c.dot(fill(colour), px, py, r, l.tip(s, p))
		}
	}
}

func (l Lines) tip(s Series, p Point) string {
	text := fmt.Sprintf("%s: %s at %s", s.Name, l.Y.Unit.format(p.Y), l.X.Unit.format(p.X))
	if p.Low != p.High {
		text += fmt.Sprintf(" (%s to %s)", l.Y.Unit.format(p.Low), l.Y.Unit.format(p.High))
	}
	return text
}

// ends writes the name of each series where it ends.
func (l Lines) ends(c *canvas, x, y *axis) {
	var at []float64
	var of []int
	for i, s := range l.Series {
		for _, p := range slices.Backward(s.Points) {
			if place, ok := y.at(p.Y); ok {
				at, of = append(at, place), append(of, i)
				break
			}
		}
	}
	colours := l.colours()
	for j, place := range spread(at, 15, y.to, y.from) {
		i := of[j]
		last := l.Series[i].Points[len(l.Series[i].Points)-1]
		px, ok := x.at(last.X)
		if !ok {
			px = x.to
		}
		c.label("ce "+fill(colours[i]), "start", px+8, place+4, l.Series[i].Name)
	}
}

// table holds the figures.
func (l Lines) table() Table {
	t := Table{Columns: []Column{{Name: "series"}, {l.X.Label, true}, {l.Y.Label, true}, {"spread", true}}}
	for _, s := range l.Series {
		for _, p := range s.Points {
			between := ""
			if p.Low != p.High {
				between = l.Y.Unit.format(p.Low) + " – " + l.Y.Unit.format(p.High)
			}
			t.Rows = append(t.Rows, Cells(s.Name, l.X.Unit.format(p.X), l.Y.Unit.format(p.Y), between))
		}
	}
	return t
}
