// Package report writes measurements as one HTML page that needs nothing else:
// text, tiles, tables, and charts as SVG that is drawn here. It is light or dark
// as the reader's system is, and prints.
//
//	page := report.Page{Title: "Load", Sections: []report.Section{{
//		Heading: "Throughput",
//		Charts: []report.Chart{report.Lines{
//			Title: "Throughput against offered load",
//			X: report.Axis{Label: "offered", Unit: report.PerSecond}, Y: report.Axis{Label: "admitted", Unit: report.PerSecond},
//			Series: []report.Series{{Name: "stream", Points: points}},
//		}},
//	}}}
//	err := page.WriteHTML(w)
//
// Charts: Lines (over anything, linear, logarithmic, or over percentiles), Bars
// (side by side, or stacked). Figures makes a table of medians and spreads
// against bounds.
package report

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"strings"
)

// Page is a page.
type Page struct {
	Title    string
	Subtitle string
	Facts    []Fact // about the run: machine, commit, command
	Sections []Section
}

// Fact is a name and a value.
type Fact struct{ Name, Value string }

// Section is a part of a page under a heading. What is empty is left out; the
// order on the page is that of the fields.
type Section struct {
	Heading string
	Text    string // paragraphs with an empty line between them
	Tiles   []Tile
	Charts  []Chart
	Tables  []Table
}

// Tile is one figure in large letters.
type Tile struct {
	Label, Value, Note string
	Verdict            Verdict
}

// Verdict is whether something is as it should be.
type Verdict int

// The verdicts. Each is shown by a sign and a colour.
const (
	NoVerdict Verdict = iota
	Pass
	Fail
)

// Table is a table.
type Table struct {
	Title   string
	Note    string
	Columns []Column
	Rows    [][]Cell
}

// Column is a column of a table.
type Column struct {
	Name    string
	Numeric bool // aligned right
}

// Cell is a cell of a table.
type Cell struct {
	Text    string
	Verdict Verdict
	graphic template.HTML // in place of Text
}

// Graphic is a drawing that stands in place of the text, if there is one.
func (c Cell) Graphic() template.HTML { return c.graphic }

// Cells makes a row of texts.
func Cells(texts ...string) []Cell {
	row := make([]Cell, len(texts))
	for i, text := range texts {
		row[i].Text = text
	}
	return row
}

// Chart is something that can be drawn: Lines or Bars.
type Chart interface {
	// draw returns the drawing, whose own identifiers begin with id, and its figures.
	draw(id string) (svg string, data Table, err error)
	// text returns what stands over and under it.
	text() (title, note string)
}

//go:embed report.html.tmpl
var source string

var page = template.Must(template.New("report").Funcs(template.FuncMap{
	"paragraphs": func(text string) []string {
		return strings.FieldsFunc(strings.ReplaceAll(text, "\n\n", "\x00"), func(r rune) bool { return r == 0 })
	},
	"pass":   func(v Verdict) bool { return v == Pass },
	"fail":   func(v Verdict) bool { return v == Fail },
	"column": func(t Table, i int) Column { return t.Columns[i] },
}).Parse(source))

// drawn is a chart on the page.
type drawn struct {
	Title, Note string
	SVG         template.HTML
	Data        *Table // nil where there would be too much
}

// dataRows bounds the figures that are listed under a chart; the JSON of a run
// has them all.
const dataRows = 400

// WriteHTML writes the page.
func (p Page) WriteHTML(w io.Writer) error {
	type section struct {
		Section
		ID    string
		Drawn []drawn
	}
	view := struct {
		Page
		Sections []section
	}{Page: p}
	for i, s := range p.Sections {
		next := section{Section: s, ID: fmt.Sprintf("s%d", i+1)}
		for j, chart := range s.Charts {
			title, note := chart.text()
			svg, data, err := chart.draw(fmt.Sprintf("c%d-%d", i+1, j+1))
			if err != nil {
				return fmt.Errorf("drawing %q: %w", title, err)
			}
			// All text in it was escaped where it was written.
			d := drawn{Title: title, Note: note, SVG: template.HTML(svg)}
			if len(data.Rows) <= dataRows {
				d.Data = &data
			}
			next.Drawn = append(next.Drawn, d)
		}
		for _, t := range s.Tables {
			for _, row := range t.Rows {
				if len(row) != len(t.Columns) {
					return fmt.Errorf("table %q: a row has %d cells, there are %d columns", t.Title, len(row), len(t.Columns))
				}
			}
		}
		view.Sections = append(view.Sections, next)
	}
	var b bytes.Buffer
	if err := page.Execute(&b, view); err != nil {
		return fmt.Errorf("making page %q: %w", p.Title, err)
	}
	if _, err := b.WriteTo(w); err != nil {
		return fmt.Errorf("writing page %q: %w", p.Title, err)
	}
	return nil
}
