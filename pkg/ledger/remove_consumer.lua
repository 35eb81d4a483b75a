#!lua flags=allow-oom
-- remove_consumer: removes a consumer that has nothing pending. Removing one
-- with pending entries would destroy them, so the look and the removal are one
-- step.
--
-- KEYS[1] orders    stream of the partition
-- ARGV[1] group     consumer group
-- ARGV[2] consumer  its name
--
-- Returns {'REMOVED'} or {'PENDING'}; an error where stream or group is missing.

if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then
  return {'PENDING'}
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return {'REMOVED'}
