#!lua flags=allow-oom
-- resolve: tells the ledger what was decided about a held order after it was
-- settled as held. Works when memory is full, since it takes next to none.
--
-- KEYS[1] meta      hash of the partition
-- KEYS[2] voucher   hash of the order's voucher
-- KEYS[3] buyers    hash, user_id -> mark
-- KEYS[4] outcomes  hash, seq -> user:kind:standing
-- ARGV[1] epoch     the order's epoch, which is the ledger's
-- ARGV[2] user_id   decimal, 0 where it is not known
-- ARGV[3] seq       the order's seq
-- ARGV[4] verdict   p persisted by a requeue, c conflict, x cancelled
-- ARGV[5] standing  with c the epoch.seq of the order that stands, else empty
--
-- Returns {'RESOLVED'}; {'NO_TOKEN'} where the ledger knows already;
-- {'IN_FLIGHT'} where the order is not settled yet, so that a writer may still
-- say that it is held, and this has to be told again; {'STALE_EPOCH', epoch}.
-- All but the first leave no effect, as does every error.
--
-- The held outcome is the token: where it is gone, nothing changes, so it
-- counts once, however often it is repeated. With c and x the order's unit
-- comes back whatever the mark holds: it is the token that stands for the unit.
-- The mark changes only where it holds this very position. settled is left as
-- it is: the order counts there since it was settled as held.
--
-- Where whoever settled the order could not read its user, the one given here
-- is taken. A cancelled order of an unknown user gave its unit back and left the
-- mark of that user: with x and the user, the mark goes, once.
--
-- Lua does not roll back. So all is read and checked first, and the writes
-- stand in such an order that every undoing is an HSET on a key on which an
-- HSET has just succeeded.

local function fault(what)
  return redis.error_reply('LEDGER_FAULT ' .. what)
end

local function whole(value)
  if value and #value <= 15 and string.find(value, '^%d+$') then
    return tonumber(value)
  end
  return nil
end

local user, seq, verdict, standing = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if verdict ~= 'p' and verdict ~= 'c' and verdict ~= 'x' then
  return fault('unknown verdict')
end
if verdict == 'c' and not string.find(standing, '^[1-9]%d*%.[1-9]%d*$') then
  return fault('conflict with no order')
end

local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch ~= ARGV[1] then
  return {'STALE_EPOCH', epoch or ''}
end

local voucher = redis.call('HMGET', KEYS[2], 'state', 'stock', 'returned', 'removed')
local outcome = redis.call('HGET', KEYS[4], seq)
-- A writer may have read the user of an order that another one could not read.
local holder = outcome and string.match(outcome, '^(%d+):h:$')
if user == '0' and holder then
  user = holder
elseif holder == '0' then
  holder = user
end
local mark = redis.call('HGET', KEYS[3], user)
-- A voucher is archived when all its orders have ended.
if voucher[1] == 'archived' then
  return {'NO_TOKEN'}
end
local stock, returned, removed = whole(voucher[2]), whole(voucher[3]), whole(voucher[4])
if not (stock and returned and removed) then
  return fault('voucher: missing, or a field is not a whole number')
end

local position = ARGV[1] .. '.' .. seq
local holds = mark and string.sub(mark, 1, -2) == position
local unit = 1
if outcome == '0:x:' and verdict == 'x' and holds then
  holder, unit = user, 0
end
if holder ~= user then
  -- Settling leaves an outcome, or a mark that says persisted.
  if outcome or (verdict == 'p' and mark == position .. 'p') then
    return {'NO_TOKEN'}
  end
  return {'IN_FLIGHT'}
end

local undo, step = {}, nil
local function write(undoing, ...)
  step = redis.pcall(...)
  if type(step) == 'table' and step.err then
    return false
  end
  undo[#undo + 1] = undoing
  return true
end

local ok = true
if verdict ~= 'p' then
  local gone = (verdict == 'x' and holds) and 1 or 0
  ok = write({'HSET', KEYS[2], 'stock', voucher[2], 'returned', voucher[3], 'removed', voucher[4]},
    'HSET', KEYS[2], 'stock', string.format('%.0f', stock + unit), 'returned', string.format('%.0f', returned + unit),
    'removed', string.format('%.0f', removed + gone))
  ok = ok and write({'HSET', KEYS[4], seq, outcome}, 'HSET', KEYS[4], seq, user .. ':' .. verdict .. ':' .. standing)
end
if ok and holds then
  if verdict == 'x' then
    ok = write(nil, 'HDEL', KEYS[3], user)
  else
    ok = write({'HSET', KEYS[3], user, mark}, 'HSET', KEYS[3], user, (verdict == 'c' and standing or position) .. 'p')
  end
end
if ok and verdict == 'p' then
  ok = write(nil, 'HDEL', KEYS[4], seq)
end
if not ok then
  local why = step.err
  for i = #undo, 1, -1 do
    redis.pcall(unpack(undo[i]))
  end
  return fault('undone: ' .. why)
end
return {'RESOLVED'}
