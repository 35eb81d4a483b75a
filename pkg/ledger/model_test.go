package ledger

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/seckill/seckill/pkg/orderid"
)

// model is what the ledger must be, said in the plainest way.
type model struct {
	opening, stock, seq, returned, settled, removed int64
	bound, in, out                                  int64
	marks                                           map[int64]string
	outcomes                                        map[int64]string
	buyers                                          map[int64]int64 // seq -> user, of all orders
	live                                            []Entry         // not settled
	trimmed                                         []string        // live, pending, and gone from the stream
	done                                            []Settlement    // settled
}

// Random admissions, settlements with random verdicts, redeliveries, repeats,
// resolutions of held orders, trims, foreign entries, added stock and changed
// bounds, against the model.
func TestLedger_AgreesWithItsModel(t *testing.T) {
	client := sharedClient(t)
	rapid.Check(t, func(rt *rapid.T) {
		b := newEmptyBook(t, client)
		m := model{marks: map[int64]string{}, outcomes: map[int64]string{}, buyers: map[int64]int64{}}
		m.opening = rapid.Int64Range(0, 30).Draw(rt, "opening")
		m.bound = rapid.Int64Range(1, 40).Draw(rt, "bound")
		m.stock = m.opening
		require.NoError(rt, CreatePartition(b.ctx, client, b.partition, epoch, m.bound))
		require.NoError(rt, OpenPartition(b.ctx, client, b.partition, epoch, m.bound, DurabilityStrict, testRunID))
		require.NoError(rt, LoadAdmit(b.ctx, client, b.partition, epoch))
		b.voucher.Opening = m.opening
		require.NoError(rt, CreateVoucher(b.ctx, client, b.voucher))
		b.apply(VoucherOpen)

		pick := func(rt *rapid.T, n int, what string) int {
			if n == 0 {
				rt.Skip("no " + what)
			}
			return rapid.IntRange(0, n-1).Draw(rt, what)
		}
		rt.Repeat(map[string]func(*rapid.T){
			"admit": func(rt *rapid.T) {
				users := rapid.SliceOfN(rapid.Int64Range(1, 20), 1, 12).Draw(rt, "users")
				reply := b.admit(users...)
				entry := Entry{VoucherID: b.voucher.VoucherID, Epoch: epoch}
				for i, user := range users {
					answer := reply.Answers[i]
					switch mark := m.marks[user]; {
					case mark != "":
						require.Equal(rt, DecisionReplayed, answer.Decision)
						require.Equal(rt, mark, fmt.Sprintf("%d.%d%c", answer.Order.Epoch, answer.Order.Seq, answer.State))
					case m.stock == 0:
						require.Equal(rt, DecisionSoldOut, answer.Decision)
					case m.seq-m.settled >= m.bound:
						require.Equal(rt, DecisionBusy, answer.Decision)
					default:
						m.seq++
						m.stock--
						m.marks[user] = fmt.Sprintf("%d.%da", epoch, m.seq)
						m.buyers[m.seq] = user
						require.Equal(rt, DecisionAdmitted, answer.Decision)
						require.Equal(rt, m.seq, answer.Order.Seq)
						entry.Orders = append(entry.Orders, Order{UserID: user, Position: answer.Order})
					}
				}
				if len(entry.Orders) > 0 {
					m.in++
					stream := b.entries()
					entry.ID = stream[len(stream)-1].ID
					m.live = append(m.live, entry)
				}
			},
			"deliver": func(*rapid.T) { b.deliver("w") },
			"take over": func(rt *rapid.T) {
				// A takeover drops trimmed entries from the pending list: they are lost
				// then, an alarm, and have no token any more. Not what is looked at here.
				if len(m.trimmed) > 0 {
					rt.Skip("trimmed")
				}
				_, err := Claim(b.ctx, client, b.partition, epoch, "taker", 0, ClaimEnd, 3)
				require.NoError(rt, err)
			},
			"settle": func(rt *rapid.T) {
				i := pick(rt, len(m.live), "entry")
				entry := m.live[i]
				s := b.settlement(entry, VerdictPersisted)
				for j := range s.Orders {
					s.Orders[j].Verdict = rapid.SampledFrom([]Verdict{'p', 'p', 'p', 'h', 'c', 'r', 'x'}).Draw(rt, "verdict")
					if s.Orders[j].Verdict == VerdictConflict {
						s.Orders[j].Standing = orderid.Position{VoucherID: entry.VoucherID, Epoch: epoch - 1, Seq: rapid.Int64Range(1, 99).Draw(rt, "standing")}
					}
				}
				units := m.settle(entry, s)
				require.Equal(rt, SettleResult{Settled: true, Units: units}, b.settle(s))
				m.live = slices.Delete(slices.Clone(m.live), i, i+1)
				m.trimmed = slices.DeleteFunc(m.trimmed, func(id string) bool { return id == entry.ID })
			},
			"settle again": func(rt *rapid.T) {
				s := m.done[pick(rt, len(m.done), "settled")]
				require.Equal(rt, SettleResult{}, b.settle(s))
				for i := range s.Orders { // also with another verdict
					s.Orders[i].Verdict = VerdictCancelled
				}
				require.Equal(rt, SettleResult{}, b.settle(s))
			},
			"resolve": func(rt *rapid.T) {
				// Any seq: held, ended otherwise, in flight or persisted.
				if m.seq == 0 {
					rt.Skip("no orders")
				}
				seq := rapid.Int64Range(1, m.seq).Draw(rt, "seq")
				if held := m.held(); len(held) > 0 && rapid.Bool().Draw(rt, "held") {
					seq = held[pick(rt, len(held), "which")]
				}
				verdict := rapid.SampledFrom([]Verdict{VerdictPersisted, VerdictConflict, VerdictCancelled}).Draw(rt, "verdict")
				r := b.resolution(m.buyers[seq], seq, verdict)
				done, err := Resolve(b.ctx, client, r)
				switch want := m.resolve(r); {
				case want == nil:
					require.NoError(rt, err)
					require.True(rt, done)
					done, err = Resolve(b.ctx, client, r)
					require.NoError(rt, err)
					require.False(rt, done, "told before")
				case errors.Is(want, ErrInFlight):
					require.ErrorIs(rt, err, ErrInFlight)
					require.False(rt, done)
				default:
					require.NoError(rt, err)
					require.False(rt, done)
				}
			},
			"discard": func(rt *rapid.T) {
				b.must("XADD", b.keys()["orders"], "*", "v", EntryVersion, "voucher", "nonsense")
				raw, err := b.do("XREVRANGE", b.keys()["orders"], "+", "-", "COUNT", "1").AsXRange()
				require.NoError(rt, err)
				discarded, err := Discard(b.ctx, client, b.partition, epoch, raw[0].ID)
				require.NoError(rt, err)
				require.True(rt, discarded)
			},
			"release": func(rt *rapid.T) {
				if len(m.trimmed) > 0 {
					rt.Skip("trimmed")
				}
				var ids []string
				for _, entry := range m.live {
					ids = append(ids, entry.ID)
				}
				_, err := Release(b.ctx, client, b.partition, epoch, "w", 0, ids)
				require.NoError(rt, err)
			},
			"add stock": func(rt *rapid.T) {
				more := rapid.Int64Range(1, 5).Draw(rt, "more")
				m.opening += more
				m.stock += more
				b.voucher.Opening = m.opening
				b.apply(VoucherOpen)
			},
			"tune": func(rt *rapid.T) { // also below what is in flight
				m.bound = rapid.Int64Range(1, 40).Draw(rt, "bound")
				require.NoError(rt, TunePartition(b.ctx, client, b.partition, epoch, m.bound, DurabilityStrict))
			},
			"trim": func(rt *rapid.T) {
				b.deliver("w")
				entry := m.live[pick(rt, len(m.live), "entry")]
				if !slices.Contains(m.trimmed, entry.ID) {
					b.must("XDEL", b.keys()["orders"], entry.ID)
					m.trimmed = append(m.trimmed, entry.ID)
				}
			},
			"": func(rt *rapid.T) {
				books := b.books()
				require.Equal(rt, Books{
					Now: books.Now, Exists: true, State: VoucherOpen, Rev: b.voucher.Rev,
					Buyers: int64(len(m.marks)), Entries: m.in - m.out - int64(len(m.trimmed)),
					Meta:  Meta{Exists: true, Open: true, Epoch: epoch, Admitted: m.seq, Settled: m.settled, EntriesIn: m.in, EntriesOut: m.out},
					Stock: m.stock, Opening: m.opening, Seq: m.seq, Returned: m.returned, Settled: m.settled, Removed: m.removed,
				}, books)
				// The equations of the books, on the ledger's own figures.
				require.Equal(rt, books.Opening+books.Returned, books.Stock+books.Seq)
				require.Equal(rt, books.Buyers, books.CarriedOver+books.Seq-books.Removed)
				require.Equal(rt, books.Entries+int64(len(m.trimmed)), books.Meta.EntriesIn-books.Meta.EntriesOut)
				require.Equal(rt, books.InFlight(), books.Meta.InFlight())
				marks, err := b.do("HGETALL", b.keys()["buyers"]).AsStrMap()
				require.NoError(rt, err)
				require.Len(rt, marks, len(m.marks))
				for user, mark := range m.marks {
					require.Equal(rt, mark, marks[formatInt(user)])
				}
				outcomes, err := b.do("HGETALL", b.keys()["outcomes"]).AsStrMap()
				require.NoError(rt, err)
				require.Len(rt, outcomes, len(m.outcomes))
				for seq, outcome := range m.outcomes {
					require.Equal(rt, outcome, outcomes[formatInt(seq)])
				}
			},
		})
		require.NoError(rt, b.do("DEL", b.keys()["meta"], b.keys()["voucher"], b.keys()["buyers"], b.keys()["outcomes"], b.keys()["orders"]).Error())
	})
}

func (m *model) settle(entry Entry, s Settlement) (units int64) {
	for _, order := range s.Orders {
		position := fmt.Sprintf("%d.%d", entry.Epoch, order.Seq)
		standing := ""
		holds := m.marks[order.UserID] != "" && m.marks[order.UserID][:len(m.marks[order.UserID])-1] == position
		switch order.Verdict {
		case VerdictPersisted, VerdictHeld:
			if holds {
				m.marks[order.UserID] = position + string(rune(order.Verdict))
			}
		case VerdictConflict:
			standing = fmt.Sprintf("%d.%d", order.Standing.Epoch, order.Standing.Seq)
			if holds {
				m.marks[order.UserID] = standing + "p"
				units++
			}
		case VerdictRejected, VerdictCancelled:
			if holds {
				delete(m.marks, order.UserID)
				m.removed++
				if order.Verdict == VerdictCancelled {
					units++
				}
			}
		}
		if order.Verdict != VerdictPersisted {
			m.outcomes[order.Seq] = fmt.Sprintf("%d:%c:%s", order.UserID, order.Verdict, standing)
		}
	}
	m.stock += units
	m.returned += units
	m.settled += int64(len(s.Orders))
	m.out++
	m.done = append(m.done, s)
	return units
}

// held lists the seqs of held orders, ascending.
func (m *model) held() []int64 {
	var seqs []int64
	for _, seq := range slices.Sorted(maps.Keys(m.outcomes)) {
		if strings.HasSuffix(m.outcomes[seq], ":h:") {
			seqs = append(seqs, seq)
		}
	}
	return seqs
}

var errTold = errors.New("the ledger was told before")

func (m *model) resolve(r Resolution) error {
	position := fmt.Sprintf("%d.%d", r.Epoch, r.Seq)
	mark := m.marks[r.UserID]
	if outcome := m.outcomes[r.Seq]; outcome != fmt.Sprintf("%d:h:", r.UserID) {
		if outcome != "" || (r.Verdict == VerdictPersisted && mark == position+"p") {
			return errTold
		}
		return ErrInFlight
	}
	holds := mark != "" && mark[:len(mark)-1] == position
	switch r.Verdict {
	case VerdictPersisted:
		delete(m.outcomes, r.Seq)
		if holds {
			m.marks[r.UserID] = position + "p"
		}
		return nil
	case VerdictConflict:
		standing := fmt.Sprintf("%d.%d", r.Standing.Epoch, r.Standing.Seq)
		m.outcomes[r.Seq] = fmt.Sprintf("%d:c:%s", r.UserID, standing)
		if holds {
			m.marks[r.UserID] = standing + "p"
		}
	case VerdictCancelled:
		m.outcomes[r.Seq] = fmt.Sprintf("%d:x:", r.UserID)
		if holds {
			delete(m.marks, r.UserID)
			m.removed++
		}
	}
	m.stock++
	m.returned++
	return nil
}
