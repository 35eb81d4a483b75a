package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// printJSON prints a message as one line. Every field is there, but for those
// that say by their absence that something is not known.
func printJSON(w io.Writer, m proto.Message) error {
	text, err := protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(m)
	if err != nil {
		return err
	}
	// protojson varies its blanks between builds; these lines are compared.
	var line bytes.Buffer
	if err := json.Compact(&line, text); err != nil {
		return err
	}
	line.WriteByte('\n')
	_, err = w.Write(line.Bytes())
	return err
}

// print prints a message in the form that was asked for.
func (c *connection) print(w io.Writer, m proto.Message) error {
	if c.Output == "json" {
		return printJSON(w, m)
	}
	table := newTable(w)
	describe(table, "", m.ProtoReflect())
	return table.Flush()
}

func newTable(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

// describe prints the fields that are set, a line each. A figure that says by its
// absence that it is not known is "-".
func describe(w io.Writer, prefix string, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		name := prefix + string(field.Name())
		switch value := m.Get(field); {
		case field.IsList():
			for j := range value.List().Len() {
				describeValue(w, fmt.Sprintf("%s[%d]", name, j), field, value.List().Get(j))
			}
		case field.HasOptionalKeyword() && !m.Has(field):
			fmt.Fprintf(w, "%s\t-\n", name)
		case field.HasPresence() && !m.Has(field):
		default:
			describeValue(w, name, field, value)
		}
	}
}

func describeValue(w io.Writer, name string, field protoreflect.FieldDescriptor, value protoreflect.Value) {
	if field.Message() == nil {
		fmt.Fprintf(w, "%s\t%s\n", name, scalar(field, value))
		return
	}
	switch m := value.Message().Interface().(type) {
	case *timestamppb.Timestamp:
		fmt.Fprintf(w, "%s\t%s\n", name, instant(m))
	case *durationpb.Duration:
		fmt.Fprintf(w, "%s\t%s\n", name, m.AsDuration())
	default:
		describe(w, name+".", value.Message())
	}
}

// scalar shows an enum without the prefix that all its values share.
func scalar(field protoreflect.FieldDescriptor, value protoreflect.Value) string {
	switch field.Kind() {
	case protoreflect.EnumKind:
		values := field.Enum().Values()
		named := values.ByNumber(value.Enum())
		if named == nil {
			return strconv.Itoa(int(value.Enum()))
		}
		return strings.TrimPrefix(string(named.Name()), strings.TrimSuffix(string(values.Get(0).Name()), "UNSPECIFIED"))
	case protoreflect.StringKind, protoreflect.BytesKind:
		return printable(value.String())
	default:
		return value.String()
	}
}

// enumName is the name of an enum's value without its prefix.
func enumName(e protoreflect.Enum) string {
	unspecified := string(e.Descriptor().Values().Get(0).Name())
	named := e.Descriptor().Values().ByNumber(e.Number())
	if named == nil {
		return strconv.Itoa(int(e.Number()))
	}
	return strings.TrimPrefix(string(named.Name()), strings.TrimSuffix(unspecified, "UNSPECIFIED"))
}

// printable keeps what others wrote from steering the terminal.
func printable(text string) string {
	quoted := strconv.Quote(text)
	if quoted == `"`+text+`"` {
		return text
	}
	return quoted
}

func instant(t *timestamppb.Timestamp) string {
	if t == nil {
		return "-"
	}
	return t.AsTime().Format("2006-01-02T15:04:05.000Z07:00")
}

// moment is a time on the command line.
type moment struct{ time.Time }

// UnmarshalText reads "now", a time from now on or back ("+2h", "-10m"), or a
// time of RFC 3339.
func (m *moment) UnmarshalText(text []byte) (err error) {
	s := string(text)
	switch {
	case s == "now":
		m.Time = time.Now()
	case strings.HasPrefix(s, "+"), strings.HasPrefix(s, "-"):
		var d time.Duration
		if d, err = time.ParseDuration(s); err == nil {
			m.Time = time.Now().Add(d)
		}
	default:
		m.Time, err = time.Parse(time.RFC3339, s)
	}
	if err != nil {
		return fmt.Errorf("%q is neither now, nor like +2h or -10m, nor like 2026-11-30T18:00:00Z", s)
	}
	return nil
}

// timestamp is nil where no time was given.
func (m moment) timestamp() *timestamppb.Timestamp {
	if m.IsZero() {
		return nil
	}
	return timestamppb.New(m.Time)
}
