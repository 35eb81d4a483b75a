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
-- ARGV[4] first     seq of the entry's first order; the others follow it
-- ARGV[5] verdicts  a letter for each order, in their order: p persisted, h
--                   held, c conflict, r rejected, x cancelled
-- ARGV[6] user_id   decimal, 0 where it could not be read; repeats for each
--                   order; with c followed by : and the epoch.seq of the order
--                   that stands
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

local first, verdicts = whole(ARGV[4]), ARGV[5]
local n = #ARGV - 5
if not first or n < 1 or #verdicts ~= n or string.find(verdicts, '[^phcrx]') then
  return fault('first is not a whole number, or not every order has a verdict')
end
local users, standing = {unpack(ARGV, 6)}, {}
if string.find(verdicts, 'c', 1, true) then
  for i = 1, n do
    if string.sub(verdicts, i, i) == 'c' then
      users[i], standing[i] = string.match(users[i], '^(%d+):([1-9]%d*%.[1-9]%d*)$')
      if not users[i] then
        return fault('conflict with no order')
      end
    end
  end
end
local last = first + n - 1
local strange = last > admitted
local counted, out = 0, 0
if not strange then
  counted = math.max(0, math.min(n, admitted - settled))
  out = entries_out < entries_in and 1 or 0
end
local whole_entry = counted == n and out == 1
local marks = redis.call('HMGET', KEYS[3], unpack(users))

-- Numbers up to 2^40 print whole.
local set, gone, ended, seqs = {}, {}, {}, {}
local units, whole_count, prefix = 0, counted == n, ARGV[3] .. '.'
for i = 1, n do
  local user, mark, verdict = users[i], marks[i], string.sub(verdicts, i, i)
  local position = prefix .. (first + i - 1)
  local holds = mark == position .. 'a'
  if not holds and whole_count then
    holds = mark and string.sub(mark, 1, -2) == position
  end
  holds = holds and not (strange and not whole_count)
  if verdict == 'p' or verdict == 'h' then
    if holds and mark ~= position .. verdict then
      set[#set + 1] = user
      set[#set + 1] = position .. verdict
    end
  elseif verdict == 'c' then
    if holds then
      set[#set + 1] = user
      set[#set + 1] = standing[i] .. 'p'
      units = units + 1
    end
  else
    if holds then
      gone[#gone + 1] = user
    end
    if verdict == 'x' and (holds or (user == '0' and whole_count)) then
      units = units + 1
    end
  end
  if verdict ~= 'p' and (holds or whole_count) then
    seqs[#seqs + 1] = first + i - 1
    ended[#ended + 1], ended[#ended + 2] = first + i - 1, user .. ':' .. verdict .. ':' .. (standing[i] or '')
  end
end
-- What the marks of some users were, as HSET takes it.
local function were(names, step)
  local by, old = {}, {}
  for i = 1, n do
    by[users[i]] = marks[i]
  end
  for i = 1, #names, step do
    old[#old + 1] = names[i]
    old[#old + 1] = by[names[i]]
  end
  return old
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

local undo = {} -- functions
local function write(...)
  step = redis.pcall(...)
  return not failed(step)
end
local ok = write('HSET', KEYS[2],
  'stock', string.format('%.0f', stock + units), 'returned', string.format('%.0f', returned + units),
  'settled', string.format('%.0f', settled + counted), 'removed', string.format('%.0f', removed + #gone))
if ok then
  undo[#undo + 1] = function()
    redis.pcall('HSET', KEYS[2], 'stock', voucher[1], 'returned', voucher[2], 'settled', voucher[3], 'removed', voucher[4])
  end
  ok = write('HSET', KEYS[1], 'settled', string.format('%.0f', meta_settled + counted), 'entries_out', string.format('%.0f', entries_out + out))
end
if ok then
  undo[#undo + 1] = function()
    redis.pcall('HSET', KEYS[1], 'settled', meta[2], 'entries_out', meta[4])
  end
  if #set > 0 then
    ok = write('HSET', KEYS[3], unpack(set))
    if ok then
      undo[#undo + 1] = function()
        redis.pcall('HSET', KEYS[3], unpack(were(set, 2)))
      end
    end
  end
end
if ok and #gone > 0 then
  ok = write('HDEL', KEYS[3], unpack(gone))
  if ok then
    undo[#undo + 1] = function()
      redis.pcall('HSET', KEYS[3], unpack(were(gone, 1)))
    end
  end
end
if ok and #seqs > 0 then
  ok = write('HSET', KEYS[4], unpack(ended))
  if ok then
    undo[#undo + 1] = function()
      for i = 1, #seqs do
        if ended_old[i] then
          redis.pcall('HSET', KEYS[4], seqs[i], ended_old[i])
        else
          redis.pcall('HDEL', KEYS[4], seqs[i])
        end
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
    undo[i]()
  end
  return fault('undone: ' .. why)
end
redis.pcall('XDEL', KEYS[5], ARGV[2])
return {whole_entry and 'SETTLED' or 'UNCOUNTED', counted, units}
