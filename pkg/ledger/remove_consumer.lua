#!lua flags=allow-oom
-- remove_consumer: removes a consumer that has nothing pending. Removing one
-- with pending entries would destroy them, so the look and the removal are one
-- step.
--
-- KEYS[1] orders       stream of the partition
-- ARGV[1] group        consumer group
-- ARGV[2] consumer     its name
-- ARGV[3] min_idle_ms  how long it must have been idle; 0: does not matter, for
--                      a writer that removes its own
--
-- Returns {'REMOVED'}; {'PENDING'} where it holds entries, and with a
-- min_idle_ms {'ACTIVE', idle_ms} where it was idle for less or {'ABSENT'}
-- where there is no such consumer, all three without effect. An error where
-- stream or group is missing.

if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then
  return {'PENDING'}
end
if tonumber(ARGV[3]) > 0 then
  local idle
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local fields = {}
    for i = 1, #consumer, 2 do
      fields[consumer[i]] = consumer[i + 1]
    end
    if fields['name'] == ARGV[2] then
      idle = fields['idle']
    end
  end
  if not idle then
    return {'ABSENT'}
  end
  if idle < tonumber(ARGV[3]) then
    return {'ACTIVE', idle}
  end
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return {'REMOVED'}
