#!lua flags=allow-oom
-- archive_voucher: removes the ledger of a closed voucher that has nothing in
-- flight. What stays is a tombstone of two fields, so that gateways can tell
-- an archived voucher from an unknown one and a late change finds a greater
-- rev. UNLINK frees the marks in the background, whatever their number.
--
-- KEYS[1] meta      hash of the partition
-- KEYS[2] voucher   hash of the voucher
-- KEYS[3] buyers    hash, user_id -> mark
-- KEYS[4] outcomes  hash, seq -> user:kind:standing
-- ARGV[1] epoch     the partition's epoch
-- ARGV[2] rev       the database's rev of the archiving
--
-- Returns {'ARCHIVED'}; {'CURRENT', rev} where it was archived before;
-- {'BUSY', state, in_flight} where the voucher is not closed or has orders in
-- flight; {'MISSING', which} or {'STALE_EPOCH', epoch}; all but the first
-- without effect.

local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  return {'MISSING', 'partition'}
end
if epoch ~= ARGV[1] then
  return {'STALE_EPOCH', epoch}
end
local voucher = redis.call('HMGET', KEYS[2], 'state', 'rev', 'seq', 'settled')
if not voucher[1] then
  return {'MISSING', 'voucher'}
end

-- Also on a repeat: a removal that was cut short is finished then.
local function remove()
  redis.call('HDEL', KEYS[2], 'stock', 'opening', 'seq', 'returned', 'settled', 'carried', 'removed', 'begin_ms', 'end_ms')
  redis.call('UNLINK', KEYS[3], KEYS[4])
end

if voucher[1] == 'archived' then
  remove()
  return {'CURRENT', voucher[2] or ''}
end
local seq, settled = tonumber(voucher[3] or ''), tonumber(voucher[4] or '')
if not seq or not settled then
  return redis.error_reply('LEDGER_FAULT voucher: a field is not a whole number')
end
if voucher[1] ~= 'closed' or seq ~= settled then
  return {'BUSY', voucher[1], seq - settled}
end
redis.call('HSET', KEYS[2], 'state', 'archived', 'rev', ARGV[2])
remove()
return {'ARCHIVED'}
