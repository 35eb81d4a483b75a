#!lua flags=no-writes
-- find_orphans: entries that were delivered and are pending with nobody: whoever
-- held them was removed with XGROUP DELCONSUMER. No read and no takeover ever
-- returns them. All of one moment, so that an entry that is being settled is
-- not taken for one.
--
-- KEYS[1] orders  stream of the partition
-- ARGV[1] group   consumer group
-- ARGV[2] limit   how many of the oldest entries are looked at
--
-- Returns {'OK', id...}; {'NO_GROUP'} where stream or group is missing.

if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'NO_GROUP'}
end
local delivered
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local fields = {}
  for i = 1, #group, 2 do
    fields[group[i]] = group[i + 1]
  end
  if fields['name'] == ARGV[1] then
    delivered = fields['last-delivered-id']
  end
end
if not delivered then
  return {'NO_GROUP'}
end
local reply = {'OK'}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', delivered, 'COUNT', ARGV[2])) do
  local id = entry[1]
  if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1) == 0 then
    reply[#reply + 1] = id
  end
end
return reply
