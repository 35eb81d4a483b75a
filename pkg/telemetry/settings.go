package telemetry

import (
	"encoding"
	"fmt"
	"io"
	"log/slog"
	"reflect"
	"strings"
	"unicode"
)

// hidden stands for the value of a field tagged `secret:""`.
const hidden = "***"

// Settings lists the effective settings of a kong configuration struct in the
// order of its fields, under the names of their flags. Embedded structs
// (anonymous, or tagged `embed:""` with their `prefix`) are flattened; fields
// that are no flags (unexported, `kong:"-"`, `cmd:""`) are left out. The value of
// a field tagged `secret:""` is shown as ***, or as empty where it is; the path
// of a secret's file is no secret, and the file is never read.
func Settings(cfg any) []slog.Attr {
	return appendSettings(nil, reflect.ValueOf(cfg), "")
}

// PrintSettings logs the effective settings as one line at level info.
func PrintSettings(log *slog.Logger, cfg any) {
	attrs := Settings(cfg)
	args := make([]any, len(attrs))
	for i, a := range attrs {
		args[i] = a
	}
	log.Info("effective settings", slog.Group("settings", args...))
}

// WriteSettings writes the effective settings for a person, a line each.
func WriteSettings(w io.Writer, cfg any) {
	for _, setting := range Settings(cfg) {
		fmt.Fprintf(w, "%s: %v\n", setting.Key, setting.Value)
	}
}

func appendSettings(attrs []slog.Attr, v reflect.Value, prefix string) []slog.Attr {
	for v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return attrs
		}
		v = v.Elem()
	}
	if v.Kind() != reflect.Struct {
		return attrs
	}
	for i := range v.NumField() {
		field := v.Type().Field(i)
		has := func(key string) bool { _, ok := tag(field, key); return ok }
		if (!field.IsExported() && !field.Anonymous) || field.Tag.Get("kong") == "-" || has("cmd") {
			continue
		}
		if has("embed") || (field.Anonymous && !has("name")) {
			nested, _ := tag(field, "prefix")
			attrs = appendSettings(attrs, v.Field(i), prefix+nested)
			continue
		}
		name, ok := tag(field, "name")
		if !ok {
			name = dashed(field.Name)
		}
		value := v.Field(i)
		switch {
		case !has("secret"):
			attrs = append(attrs, slog.Any(prefix+name, shown(value)))
		case value.IsZero():
			attrs = append(attrs, slog.String(prefix+name, ""))
		default:
			attrs = append(attrs, slog.String(prefix+name, hidden))
		}
	}
	return attrs
}

// tag reads a key from both forms that kong accepts: bare (`name:"x"`) and inside
// `kong:"name='x',embed"`.
func tag(field reflect.StructField, key string) (string, bool) {
	if value, ok := field.Tag.Lookup(key); ok {
		return value, true
	}
	for part := range strings.SplitSeq(field.Tag.Get("kong"), ",") {
		if k, value, _ := strings.Cut(part, "="); strings.TrimSpace(k) == key {
			return strings.Trim(value, "'"), true
		}
	}
	return "", false
}

// shown returns what a person would write for the value: 2s, not 2000000000.
func shown(v reflect.Value) any {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return ""
		}
		v = v.Elem()
	}
	x := v.Interface()
	switch t := x.(type) {
	case encoding.TextMarshaler:
		if text, err := t.MarshalText(); err == nil {
			return string(text)
		}
	case fmt.Stringer:
		return t.String()
	}
	switch v.Kind() {
	case reflect.Bool, reflect.String, reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Float32, reflect.Float64:
		return x
	default:
		return fmt.Sprint(x)
	}
}

// dashed is kong's own rule for the name of a flag: MaxDeadline is max-deadline,
// TLSKeyFile is tls-key-file, HTTP2Port is http-2-port.
func dashed(name string) string {
	var words []string
	runes := []rune(name)
	start := 0
	for i := 1; i < len(runes); i++ {
		before, here := class(runes[i-1]), class(runes[i])
		changes := before != here && !(before == upper && here == lower)
		acronymEnds := before == upper && here == upper && i+1 < len(runes) && class(runes[i+1]) == lower
		if changes || acronymEnds {
			words = append(words, string(runes[start:i]))
			start = i
		}
	}
	words = append(words, string(runes[start:]))
	return strings.ToLower(strings.Join(words, "-"))
}

const (
	other = iota
	upper
	lower
	digit
)

func class(r rune) int {
	switch {
	case unicode.IsUpper(r):
		return upper
	case unicode.IsLower(r):
		return lower
	case unicode.IsDigit(r):
		return digit
	default:
		return other
	}
}
