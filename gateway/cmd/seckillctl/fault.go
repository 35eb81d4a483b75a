package main

import (
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

// fault makes the error of a call readable: who answered, code, reason, message;
// then each field that is wrong, and when to come again.
func (s *server) fault(err error) error {
	st := status.Convert(err)
	name, lines := code.Code(st.Code()).String(), []string{}
	for _, detail := range st.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			name += ", " + strings.TrimPrefix(d.GetReason(), "ERROR_REASON_")
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				lines = append(lines, fmt.Sprintf("\n  %s: %s", v.GetField(), v.GetDescription()))
			}
		case *errdetails.RetryInfo:
			lines = append(lines, fmt.Sprintf("\n  try again after %s", d.GetRetryDelay().AsDuration()))
		}
	}
	return fmt.Errorf("%s at %s: %s: %s%s", s.kind, s.addr, name, st.Message(), strings.Join(lines, ""))
}
