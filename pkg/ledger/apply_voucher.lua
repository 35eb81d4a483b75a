#!lua flags=allow-oom
-- apply_voucher: brings a voucher's ledger to what the database says: state,
-- window and opening stock, all as absolute values. Opens, pauses, resumes and
-- closes. Only a greater rev changes anything, so a late or repeated call of an
-- older change does no harm.
--
-- KEYS[1] meta      hash of the partition
-- KEYS[2] voucher   hash of the voucher
-- ARGV[1] epoch     the partition's epoch
-- ARGV[2] rev       the database's rev of what follows
-- ARGV[3] state     open, paused or closed
-- ARGV[4] begin_ms  window, inclusive
-- ARGV[5] end_ms    window, exclusive
-- ARGV[6] opening   units that this epoch began with
--
-- Returns {'APPLIED'}; {'CURRENT', rev} where the ledger has this rev or a
-- later one; {'MISSING', which} (partition or voucher, never made here) or
-- {'STALE_EPOCH', epoch}; all but the first without effect.

local function whole(value)
  if value and #value <= 15 and string.find(value, '^%d+$') then
    return tonumber(value)
  end
  return nil
end

local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  return {'MISSING', 'partition'}
end
if epoch ~= ARGV[1] then
  return {'STALE_EPOCH', epoch}
end
local voucher = redis.call('HMGET', KEYS[2], 'rev', 'stock', 'opening')
if not voucher[1] and not voucher[2] then
  return {'MISSING', 'voucher'}
end
local rev = whole(voucher[1])
if not rev then
  return redis.error_reply('LEDGER_FAULT voucher: rev is not a whole number')
end
if rev >= tonumber(ARGV[2]) then
  return {'CURRENT', voucher[1]}
end
local stock, opening = whole(voucher[2]), whole(voucher[3])
if not (stock and opening) then
  return redis.error_reply('LEDGER_FAULT voucher: a field is not a whole number')
end
local units, moved = ARGV[6], stock + tonumber(ARGV[6]) - opening
if moved < 0 then
  if ARGV[3] == 'open' then
    return redis.error_reply('LEDGER_FAULT voucher: fewer units than were admitted')
  end
  -- To stop selling must not fail for a wrong number.
  units, moved = voucher[3], stock
end
redis.call('HSET', KEYS[2], 'rev', ARGV[2], 'state', ARGV[3], 'begin_ms', ARGV[4], 'end_ms', ARGV[5],
  'opening', units, 'stock', string.format('%.0f', moved))
return {'APPLIED'}
