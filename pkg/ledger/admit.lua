#!lua
-- admit: decides a batch of Grabs of one voucher and enqueues the admitted
-- ones as one stream entry. Refused before it starts when memory is full.
--
-- KEYS[1] meta       hash of the partition
-- KEYS[2] voucher    hash of the voucher
-- KEYS[3] buyers     hash, user_id -> mark
-- KEYS[4] orders     stream of the partition; must exist
-- ARGV[1] epoch      the epoch that the gateway believes in
-- ARGV[2] seen       highest seq that the gateway has seen of the voucher in
--                    this epoch
-- ARGV[3] not_after  Redis time in ms; later than that nobody is admitted
-- ARGV[4] voucher_id decimal
-- ARGV[5] user_id    decimal; this and the next repeat for each Grab
-- ARGV[6] record     one encoded element of OrderBatch.orders
--
-- Returns {'OK', now_ms, first_seq, durability, answer...}, an answer per Grab:
-- the user's mark where an order exists, else a number: 1 admitted (the k-th
-- of the batch has seq first_seq + k - 1), 2 sold out, 3 not started, 4 ended,
-- 5 paused, 6 busy (bound on orders in flight), 7 late (past not_after), 9 the
-- user's mark is none: whether an order exists cannot be told, and he alone is
-- not decided. (8 is what the Go side makes of a mark.)
-- Returns {'STALE_EPOCH', now_ms, epoch}, {'CLOSED', now_ms, reason},
-- {'NOT_FOUND', now_ms}, {'ARCHIVED', now_ms} or {'REWOUND', now_ms, seq}
-- where nothing was decided. An error that begins with LEDGER_FAULT names a
-- ledger that must not be; like every error it leaves no effect.
--
-- Lua isolates but does not roll back. So everything is read and checked
-- before the first write, that is XADD, and the writes that follow are undone
-- if one fails; that XDEL is allowed is tried on an id that no entry has. HSET
-- of computed values, as HINCRBY could fail by itself.

local function fault(what)
  return redis.error_reply('LEDGER_FAULT ' .. what)
end

-- A counter of at most 15 digits, so that a double holds it exactly.
local function whole(value)
  if value and #value <= 15 and string.find(value, '^%d+$') then
    return tonumber(value)
  end
  return nil
end

-- <epoch>.<seq><state>, both as large as an order_id has room for. Any letter
-- is an order: a later version may know states that this one does not.
local function sound(mark)
  local epoch, seq = string.match(mark, '^(%d+)%.(%d+)[a-z]$')
  epoch, seq = tonumber(epoch), tonumber(seq)
  return epoch and epoch >= 1 and epoch <= 16777215 and seq >= 1 and seq <= 1099511627775
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'durability', 'bound', 'admitted', 'settled', 'entries_in', 'reason')
if not meta[1] or not meta[2] then
  return {'CLOSED', now, 'ledger missing'}
end
if meta[1] ~= ARGV[1] then
  return {'STALE_EPOCH', now, meta[1]}
end
if meta[2] ~= 'open' then
  return {'CLOSED', now, meta[8] or ''}
end

local voucher = redis.call('HMGET', KEYS[2], 'state', 'stock', 'seq', 'begin_ms', 'end_ms')
local state = voucher[1]
if not state and not voucher[2] and not voucher[3] then
  return {'NOT_FOUND', now}
end
if state == 'archived' then
  return {'ARCHIVED', now}
end
if state == 'draft' then
  return {'NOT_FOUND', now}
end

local bound, admitted, settled, entries_in = whole(meta[4]), whole(meta[5]), whole(meta[6]), whole(meta[7])
if not (bound and admitted and settled and entries_in) then
  return fault('meta: a counter is not a whole number')
end
local stock, seq, begin_ms, end_ms = whole(voucher[2]), whole(voucher[3]), whole(voucher[4]), whole(voucher[5])
if not (stock and seq and begin_ms and end_ms) then
  return fault('voucher ' .. ARGV[4] .. ': a field is not a whole number')
end
if seq < tonumber(ARGV[2]) then
  return {'REWOUND', now, seq}
end

local users, n = {}, 0
for i = 5, #ARGV, 2 do
  n = n + 1
  users[n] = ARGV[i]
end
local marks = redis.call('HMGET', KEYS[3], unpack(users))

-- What holds for everybody who has no order yet.
local refusal
if now > tonumber(ARGV[3]) then
  refusal = 7
elseif state == 'paused' then
  refusal = 5
elseif state == 'closed' then
  refusal = 4
elseif state ~= 'open' then
  return fault('voucher ' .. ARGV[4] .. ': unknown state')
elseif now < begin_ms then
  refusal = 3
elseif now >= end_ms then
  refusal = 4
end

-- Numbers up to 2^40 print whole.
local answers = {'OK', now, seq + 1, meta[3] or ''}
local records, new, marked, k = {}, {}, {}, 0
local room = bound - (admitted - settled)
-- Sold out comes before busy, also where more are in flight than may be.
local most, full = math.min(stock, room), stock <= math.max(room, 0) and 2 or 6
local position = ARGV[1] .. '.'
for i = 1, n do
  local user = users[i]
  local mark = marks[i] or new[user]
  if marks[i] and not sound(marks[i]) then
    answers[4 + i] = 9
  elseif mark then
    answers[4 + i] = mark
  elseif refusal then
    answers[4 + i] = refusal
  elseif k >= most then
    answers[4 + i] = full
  else
    k = k + 1
    records[k] = ARGV[4 + 2 * i]
    mark = position .. (seq + k) .. 'a'
    new[user] = mark
    marked[2 * k - 1], marked[2 * k] = user, mark
    answers[4 + i] = 1
  end
end
if k == 0 then
  return answers
end
-- An order_id has 40 bits for seq and 24 for the epoch.
if seq + k > 1099511627775 or #ARGV[1] > 8 or tonumber(ARGV[1]) > 16777215 then
  return fault('voucher ' .. ARGV[4] .. ': epoch or seq is at its limit')
end

-- The undoing needs XDEL: where it is denied, nothing is begun.
redis.call('XDEL', KEYS[4], '0-0')
local entry = redis.call('XADD', KEYS[4], 'NOMKSTREAM', '*',
  'v', '1', 'voucher', ARGV[4], 'epoch', ARGV[1], 'first', string.format('%.0f', seq + 1),
  'n', k, 'at', string.format('%.0f', now), 'orders', table.concat(records))
if not entry then
  return fault('orders: the stream is missing')
end

local done = redis.pcall('HSET', KEYS[2], 'stock', string.format('%.0f', stock - k), 'seq', string.format('%.0f', seq + k))
if type(done) == 'table' and done.err then
  redis.pcall('XDEL', KEYS[4], entry)
  return fault('undone: ' .. done.err)
end
done = redis.pcall('HSET', KEYS[1], 'admitted', string.format('%.0f', admitted + k), 'entries_in', string.format('%.0f', entries_in + 1))
if type(done) == 'table' and done.err then
  redis.pcall('XDEL', KEYS[4], entry)
  redis.pcall('HSET', KEYS[2], 'stock', voucher[2], 'seq', voucher[3])
  return fault('undone: ' .. done.err)
end
done = redis.pcall('HSET', KEYS[3], unpack(marked))
if type(done) == 'table' and done.err then
  redis.pcall('XDEL', KEYS[4], entry)
  redis.pcall('HSET', KEYS[2], 'stock', voucher[2], 'seq', voucher[3])
  redis.pcall('HSET', KEYS[1], 'admitted', meta[5], 'entries_in', meta[7])
  return fault('undone: ' .. done.err)
end
return answers
