package report

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// canvas is an SVG under construction.
type canvas struct{ strings.Builder }

// Sizes in units of the drawing, which are about pixels.
const (
	width      = 640.0
	charWidth  = 6.7 // of a text of 12 to 13 pixels, on average
	lineHeight = 16.0
)

// drawing wraps what is drawn, with what a screen reader says of it.
func (c *canvas) drawing(id, title, about string, height float64) string {
	var out strings.Builder
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %s %s" role="img" aria-labelledby="%s-t %s-d">`, num(width), num(height), id, id)
	fmt.Fprintf(&out, `<title id="%s-t">%s</title><desc id="%s-d">%s</desc>`, id, escape(title), id, escape(about))
	return out.String() + c.String() + "</svg>"
}

func (c *canvas) line(class string, x1, y1, x2, y2 float64) {
	fmt.Fprintf(c, `<line class="%s" x1="%s" y1="%s" x2="%s" y2="%s"/>`, class, num(x1), num(y1), num(x2), num(y2))
}

// label writes a text; anchor is start, middle or end.
func (c *canvas) label(class, anchor string, x, y float64, text string) {
	fmt.Fprintf(c, `<text class="%s" text-anchor="%s" x="%s" y="%s">%s</text>`, class, anchor, num(x), num(y), escape(text))
}

// bar is a box with a tooltip.
func (c *canvas) bar(class string, x, y, w, h float64, tip string) {
	fmt.Fprintf(c, `<rect class="%s" x="%s" y="%s" width="%s" height="%s" rx="2"><title>%s</title></rect>`, class, num(x), num(y), num(max(w, 0)), num(h), escape(tip))
}

// dot is a point with a tooltip over a wider ground.
func (c *canvas) dot(class string, x, y, r float64, tip string) {
	fmt.Fprintf(c, `<g><title>%s</title><circle class="ch" cx="%s" cy="%s" r="9"/><circle class="cp %s" cx="%s" cy="%s" r="%s"/></g>`,
		escape(tip), num(x), num(y), class, num(x), num(y), num(r))
}

// legend names the series over the drawing, in their colours, and returns the
// height it takes.
func (c *canvas) legend(x float64, names []string, colours []int) float64 {
	at, row := x, 0.0
	for i, name := range names {
		wide := textWidth(name) + 34
		if at > x && at+wide > width {
			at, row = x, row+1
		}
		y := 6 + row*lineHeight
		fmt.Fprintf(c, `<rect class="%s" x="%s" y="%s" width="12" height="8" rx="2"/>`, fill(colours[i]), num(at), num(y))
		c.label("cs", "start", at+18, y+8, name)
		at += wide
	}
	return (row + 1) * lineHeight
}

// Colours are numbered from 0; the last one, grey, is for what is there to
// compare with.
const (
	colours = 7
	grey    = 7
)

func stroke(colour int) string { return "k" + strconv.Itoa(colour+1) }
func fill(colour int) string   { return "f" + strconv.Itoa(colour+1) }

func textWidth(text string) float64 { return float64(len([]rune(text))) * charWidth }

// num is a place, to a tenth.
func num(v float64) string { return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64) }

// escape makes text safe in SVG, and drops what XML cannot hold.
func escape(text string) string {
	return html.EscapeString(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == unicode.ReplacementChar || r == 0xfffe || r == 0xffff {
			return ' '
		}
		return r
	}, text))
}

// spread moves places apart until none is nearer to the next than gap, within
// from and to as far as there is room; it keeps their order.
func spread(places []float64, gap, from, to float64) []float64 {
	order := make([]int, len(places))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case places[a] < places[b]:
			return -1
		case places[a] > places[b]:
			return 1
		}
		return 0
	})
	moved := slices.Clone(places)
	least := from
	for _, i := range order {
		moved[i] = max(moved[i], least)
		least = moved[i] + gap
	}
	most := to
	for _, i := range slices.Backward(order) {
		moved[i] = min(moved[i], most)
		most = moved[i] - gap
	}
	return moved
}
