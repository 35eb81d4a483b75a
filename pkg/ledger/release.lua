#!lua flags=allow-oom
-- release: hands back entries that a stopping writer holds and will not
-- finish. They become those of a consumer that nobody is, idle for as long as
-- a takeover waits for, so that a peer takes them at once. JUSTID leaves the
-- delivery counts as they are: nothing was tried with these entries.
--
-- KEYS[1] orders       stream of the partition
-- ARGV[1] group        consumer group
-- ARGV[2] consumer     the one that stops
-- ARGV[3] released     the consumer that nobody is
-- ARGV[4] min_idle_ms  how long they are to have been idle
-- ARGV[5] entry_id     an entry; repeats
--
-- Returns {'RELEASED', n}. An error where stream or group is missing. Every
-- error leaves no effect.
--
-- Only what is pending and still the consumer's own: an entry that a peer took
-- over meanwhile is the peer's. An entry that is no longer in the stream stays
-- where it is: XCLAIM would drop it from the pending list without a word, and a
-- takeover is to find it and raise the alarm.

local own = {}
for i = 5, #ARGV do
  local id = ARGV[i]
  if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2]) > 0 and
    #redis.call('XRANGE', KEYS[1], id, id, 'COUNT', 1) > 0 then
    own[#own + 1] = id
  end
end
if #own == 0 then
  return {'RELEASED', 0}
end
local claim = {'XCLAIM', KEYS[1], ARGV[1], ARGV[3], '0'}
for i = 1, #own do
  claim[#claim + 1] = own[i]
end
claim[#claim + 1] = 'IDLE'
claim[#claim + 1] = ARGV[4]
claim[#claim + 1] = 'JUSTID'
return {'RELEASED', #redis.call(unpack(claim))}
