#!lua flags=allow-oom
-- tune_partition: changes the durability and the bound of a partition that is
-- open. Unlike open_partition it never opens one: whoever closed it meanwhile
-- is not overruled.
--
-- KEYS[1] meta        hash of the partition
-- ARGV[1] epoch       the epoch that the guardian believes in
-- ARGV[2] durability  strict or fast: what the server's configuration gives
-- ARGV[3] bound       most orders in flight
--
-- Returns {'TUNED'}; {'CLOSED', reason}, {'MISSING'} or {'STALE_EPOCH', epoch}
-- without effect.

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'reason')
if not meta[1] then
  return {'MISSING'}
end
if meta[1] ~= ARGV[1] then
  return {'STALE_EPOCH', meta[1]}
end
if meta[2] ~= 'open' then
  return {'CLOSED', meta[3] or ''}
end
redis.call('HSET', KEYS[1], 'durability', ARGV[2], 'bound', ARGV[3])
return {'TUNED'}
