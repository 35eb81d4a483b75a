#!lua flags=allow-oom
-- discard_entry: acknowledges an entry that stands for no order of this
-- partition: one that cannot be decoded and names no sound positions, or one
-- of a voucher of another partition. To be called when it is a committed dead
-- letter. Works when memory is full, since it frees some.
--
-- KEYS[1] meta      hash of the partition
-- KEYS[2] orders    stream of the partition
-- ARGV[1] group     consumer group
-- ARGV[2] entry_id  the entry
-- ARGV[3] epoch     the epoch of the stream
--
-- Returns {'DISCARDED'}; {'NO_TOKEN'} where the entry is gone already;
-- {'STALE_EPOCH', epoch} where the ledger is of another epoch. All but the
-- first leave no effect, as does every error.
--
-- No counter changes. Admission counts an entry and its orders in the step that
-- writes it, and what it writes is sound; so an entry of this kind was put
-- there by something else and counted nowhere. While it lies there the stream
-- is longer than entries_in - entries_out; without it both agree again.
--
-- The entry is the token, as with settle. XACK comes before XDEL, and that
-- XDEL is allowed is tried on an id that no entry has.

local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch ~= ARGV[3] then
  return {'STALE_EPOCH', epoch or ''}
end

local pending = redis.pcall('XPENDING', KEYS[2], ARGV[1], ARGV[2], ARGV[2], 1)
if pending.err then
  if not string.find(pending.err, '^NOGROUP') then
    return pending
  end
  pending = {}
end
if #pending == 0 and #redis.call('XRANGE', KEYS[2], ARGV[2], ARGV[2], 'COUNT', 1) == 0 then
  return {'NO_TOKEN'}
end

redis.call('XDEL', KEYS[2], '0-0')
redis.call('XACK', KEYS[2], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[2], ARGV[2])
return {'DISCARDED'}
