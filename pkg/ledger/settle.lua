#!lua flags=allow-oom
-- settle: acknowledges one entry whose orders all have a committed verdict,
-- and tells the ledger these verdicts. The only place that acknowledges. Works
-- when memory is full, since it frees some.
--
-- KEYS[1] meta      hash of the partition
-- KEYS[2] voucher   hash of the entry's voucher
-- KEYS[3] buyers    hash, user_id -> mark
-- KEYS[4] outcomes  hash, seq -> user:kind:standing, for orders that did not
--                   end as a row
-- KEYS[5] orders    stream of the partition
-- ARGV[1] group     consumer group
-- ARGV[2] entry_id  the entry
-- ARGV[3] epoch     the entry's epoch
-- ARGV[4] user_id   decimal; this and the next three repeat for each order; 0
--                   where it could not be read
-- ARGV[5] seq       the order's seq
-- ARGV[6] verdict   p persisted, h held, c conflict, r rejected, x cancelled
-- ARGV[7] standing  with c the epoch.seq of the order that stands, else empty
--
-- Returns {'SETTLED', orders, units_returned}; {'UNCOUNTED', orders_counted,
-- units_returned} where the stream carried an entry that was never admitted;
-- {'NO_TOKEN'} where the entry was settled before; {'STALE_EPOCH', epoch} where
-- the ledger is of another epoch. The last two leave no effect, as does every
-- error.
--
-- Admission moves entry, seq and entries_in as one. So where seq is below the
-- entry's last, nobody admitted the entry: it is taken away and nothing else
-- changes. Where settled would pass seq, or entries_out entries_in, this entry
-- or one that was settled before it is a stranger's, and nobody can tell which.
-- So both stop where they can be at most: with nothing in flight they are right,
-- whatever a stranger added. Only an order that its mark says is in flight is
-- told then: nothing is told twice.
--
-- The entry is the token: it counts once, whether it is pending, undelivered
-- or was trimmed while a writer held it. A mark changes only where it still
-- holds this very position, and a unit comes back only together with such a
-- change. An order whose user could not be read has no mark to go by: the entry
-- alone is its token then. MySQL committed first: after a crash in between the
-- entry is redelivered and comes here again.
--
-- Lua does not roll back, and an entry that is gone cannot be put back. So all
-- is read and checked first; then come the writes that can be undone, and
-- XACK and XDEL last: that XDEL is allowed is tried on an id that no entry has.

local function fault(what)
  return redis.error_reply('LEDGER_FAULT ' .. what)
end

local function whole(value)
  if value and #value <= 15 and string.find(value, '^%d+$') then
    return tonumber(value)
  end
  return nil
end

local function failed(reply)
  return type(reply) == 'table' and reply.err
end

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'settled', 'entries_in', 'entries_out')
if meta[1] ~= ARGV[3] then
  return {'STALE_EPOCH', meta[1] or ''}
end

-- Asked before the voucher is looked at: an entry that a peer settled long ago
-- may be of a voucher that was archived since.
local pending = redis.pcall('XPENDING', KEYS[5], ARGV[1], ARGV[2], ARGV[2], 1)
if failed(pending) then
  if not string.find(pending.err, '^NOGROUP') then
    return pending
  end
  pending = {}
end
if #pending == 0 and #redis.call('XRANGE', KEYS[5], ARGV[2], ARGV[2], 'COUNT', 1) == 0 then
  return {'NO_TOKEN'}
end

local meta_settled, entries_in, entries_out = whole(meta[2]), whole(meta[3]), whole(meta[4])
if not (meta_settled and entries_in and entries_out) then
  return fault('meta: a counter is not a whole number')
end

local voucher = redis.call('HMGET', KEYS[2], 'stock', 'returned', 'settled', 'removed', 'seq')
local stock, returned, settled, removed = whole(voucher[1]), whole(voucher[2]), whole(voucher[3]), whole(voucher[4])
local admitted = whole(voucher[5])
if not (stock and returned and settled and removed and admitted) then
  return fault('voucher: missing, or a field is not a whole number')
end

local users, n, last = {}, 0, 0
for i = 4, #ARGV, 4 do
  n = n + 1
  users[n] = ARGV[i]
  local seq = whole(ARGV[i + 1])
  if not seq then
    return fault('seq is not a whole number')
  end
  last = math.max(last, seq)
end
local strange = last > admitted
local counted, out = 0, 0
if not strange then
  counted = math.max(0, math.min(n, admitted - settled))
  out = entries_out < entries_in and 1 or 0
end
local whole_entry = counted == n and out == 1
local marks = redis.call('HMGET', KEYS[3], unpack(users))

local set, set_old, gone, gone_old, ended, seqs = {}, {}, {}, {}, {}, {}
local units = 0
for i = 1, n do
  local at = 4 * i
  local user, seq, verdict, standing = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local position = ARGV[3] .. '.' .. seq
  local mark = marks[i]
  local holds = mark and string.sub(mark, 1, -2) == position
  if counted < n then
    holds = not strange and mark == position .. 'a'
  end
  if verdict == 'p' or verdict == 'h' then
    if holds and mark ~= position .. verdict then
      set[#set + 1], set[#set + 2] = user, position .. verdict
      set_old[#set_old + 1], set_old[#set_old + 2] = user, mark
    end
  elseif verdict == 'c' then
    if not string.find(standing, '^[1-9]%d*%.[1-9]%d*$') then
      return fault('conflict with no order')
    end
    if holds then
      set[#set + 1], set[#set + 2] = user, standing .. 'p'
      set_old[#set_old + 1], set_old[#set_old + 2] = user, mark
      units = units + 1
    end
  elseif verdict == 'r' or verdict == 'x' then
    if holds then
      gone[#gone + 1] = user
      gone_old[#gone_old + 1], gone_old[#gone_old + 2] = user, mark
    end
    if verdict == 'x' and (holds or (user == '0' and counted == n)) then
      units = units + 1
    end
  else
    return fault('unknown verdict')
  end
  if verdict ~= 'p' and (holds or counted == n) then
    seqs[#seqs + 1] = seq
    ended[#ended + 1], ended[#ended + 2] = seq, user .. ':' .. verdict .. ':' .. standing
  end
end
local ended_old = {}
if #seqs > 0 then
  ended_old = redis.call('HMGET', KEYS[4], unpack(seqs))
end

local step = redis.pcall('XDEL', KEYS[5], '0-0')
if not failed(step) and #gone + #seqs > 0 then
  step = redis.pcall('HDEL', KEYS[4], '')
end
if failed(step) then
  return fault('undone: ' .. step.err)
end

local undo = {}
local function write(...)
  step = redis.pcall(...)
  return not failed(step)
end
local ok = write('HSET', KEYS[2],
  'stock', string.format('%.0f', stock + units), 'returned', string.format('%.0f', returned + units),
  'settled', string.format('%.0f', settled + counted), 'removed', string.format('%.0f', removed + #gone))
if ok then
  undo[#undo + 1] = {'HSET', KEYS[2], 'stock', voucher[1], 'returned', voucher[2], 'settled', voucher[3], 'removed', voucher[4]}
  ok = write('HSET', KEYS[1], 'settled', string.format('%.0f', meta_settled + counted), 'entries_out', string.format('%.0f', entries_out + out))
end
if ok then
  undo[#undo + 1] = {'HSET', KEYS[1], 'settled', meta[2], 'entries_out', meta[4]}
  if #set > 0 then
    ok = write('HSET', KEYS[3], unpack(set))
    if ok then
      undo[#undo + 1] = {'HSET', KEYS[3], unpack(set_old)}
    end
  end
end
if ok and #gone > 0 then
  ok = write('HDEL', KEYS[3], unpack(gone))
  if ok then
    undo[#undo + 1] = {'HSET', KEYS[3], unpack(gone_old)}
  end
end
if ok and #seqs > 0 then
  ok = write('HSET', KEYS[4], unpack(ended))
  if ok then
    for i = 1, #seqs do
      if ended_old[i] then
        undo[#undo + 1] = {'HSET', KEYS[4], seqs[i], ended_old[i]}
      else
        undo[#undo + 1] = {'HDEL', KEYS[4], seqs[i]}
      end
    end
  end
end
if ok then
  ok = write('XACK', KEYS[5], ARGV[1], ARGV[2])
end
if not ok then
  local why = step.err
  for i = #undo, 1, -1 do
    redis.pcall(unpack(undo[i]))
  end
  return fault('undone: ' .. why)
end
redis.pcall('XDEL', KEYS[5], ARGV[2])
return {whole_entry and 'SETTLED' or 'UNCOUNTED', counted, units}
