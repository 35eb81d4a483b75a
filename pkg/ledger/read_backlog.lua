#!lua flags=no-writes
-- read_backlog: what waits in a partition's stream and who holds it, all of one
-- moment.
--
-- KEYS[1] orders  stream of the partition
-- ARGV[1] group   consumer group
--
-- Returns {'OK', XLEN, id of the oldest entry or '', pending, consumers} with
-- what XINFO CONSUMERS answers; {'NO_GROUP', XLEN, oldest} where the group is
-- missing; {'NO_STREAM'}.

if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'NO_STREAM'}
end
local length = redis.call('XLEN', KEYS[1])
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)
oldest = oldest[1] and oldest[1][1] or ''
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1])
if pending.err then
  if string.find(pending.err, '^NOGROUP') then
    return {'NO_GROUP', length, oldest}
  end
  return pending
end
return {'OK', length, oldest, pending[1], redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])}
