#!lua flags=no-writes
-- find_orphans: entries that were delivered and are pending with nobody: whoever
-- held them was removed with XGROUP DELCONSUMER. No read and no takeover ever
-- returns them. All of one moment, so that an entry that is being settled is
-- not taken for one.
--
-- KEYS[1] orders  stream of the partition
-- ARGV[1] group   consumer group
-- ARGV[2] after   id behind which entries are looked at, empty for the oldest on
-- ARGV[3] limit   how many entries are looked at
--
-- Returns {'OK', last, id...}, with the last entry that was looked at, or with
-- an empty one where there are no more; {'NO_GROUP'} where stream or group is
-- missing.

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
local from = ARGV[2] == '' and '-' or '(' .. ARGV[2]
local entries = redis.call('XRANGE', KEYS[1], from, delivered, 'COUNT', ARGV[3])
local reply = {'OK', #entries == tonumber(ARGV[3]) and entries[#entries][1] or ''}
for _, entry in ipairs(entries) do
  local id = entry[1]
  if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1) == 0 then
    reply[#reply + 1] = id
  end
end
return reply
