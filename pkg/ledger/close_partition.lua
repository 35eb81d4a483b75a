#!lua flags=allow-oom
-- close_partition: stops a partition from admitting. Orders in flight are
-- still persisted and settled.
--
-- KEYS[1] meta    hash of the partition
-- ARGV[1] epoch   the epoch that the guardian believes in
-- ARGV[2] reason  shown to operators; one that begins with 'fault: ' stays until
--                 the ledger is rebuilt, and gives way to no other
--
-- Returns {'CLOSED'}; {'MISSING'} (missing is closed, and is never made here)
-- or {'STALE_EPOCH', epoch} without effect.

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'reason')
if not meta[1] then
  return {'MISSING'}
end
if meta[1] ~= ARGV[1] then
  return {'STALE_EPOCH', meta[1]}
end
if meta[2] == 'closed' and string.sub(meta[3] or '', 1, 7) == 'fault: ' then
  return {'CLOSED'}
end
redis.call('HSET', KEYS[1], 'state', 'closed', 'reason', ARGV[2])
return {'CLOSED'}
