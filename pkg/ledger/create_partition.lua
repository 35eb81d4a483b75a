#!lua
-- create_partition: makes the ledger of a partition, closed. Only for a
-- partition that the database shows was never open.
--
-- KEYS[1] meta    hash of the partition
-- KEYS[2] orders  stream of the partition
-- ARGV[1] epoch   the partition's epoch
-- ARGV[2] bound   most orders in flight
-- ARGV[3] group   consumer group, created at 0 so that no entry is skipped
--
-- Returns {'CREATED'}; {'EXISTS'} where an unused ledger of this epoch is there
-- already (a repeat after a crash); {'REFUSED', epoch, why} where anything else
-- is there, without effect.

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'admitted')
if redis.call('EXISTS', KEYS[1]) == 1 then
  if meta[1] ~= ARGV[1] then
    return {'REFUSED', meta[1] or '', 'a ledger of another epoch is there'}
  end
  if meta[2] ~= 'closed' or meta[3] ~= '0' or redis.call('EXISTS', KEYS[2]) == 0 then
    return {'REFUSED', meta[1], 'a ledger that was in use is there'}
  end
  return {'EXISTS'}
end
if redis.call('XLEN', KEYS[2]) > 0 then
  return {'REFUSED', '', 'a stream without a ledger is there'}
end
local group = redis.pcall('XGROUP', 'CREATE', KEYS[2], ARGV[3], '0', 'MKSTREAM')
if group.err and not string.find(group.err, '^BUSYGROUP') then
  return group
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'state', 'closed', 'reason', 'created', 'durability', '',
  'bound', ARGV[2], 'admitted', '0', 'settled', '0', 'entries_in', '0', 'entries_out', '0', 'admit_sha', '')
return {'CREATED'}
