#!lua flags=allow-oom
-- open_partition: lets a partition admit. Only after its ledger was proven;
-- the guardian loads the admission script after this.
--
-- KEYS[1] meta        hash of the partition
-- ARGV[1] epoch       the epoch that was proven
-- ARGV[2] durability  strict or fast: what the server's configuration gives
-- ARGV[3] bound       most orders in flight
-- ARGV[4] admit_sha   the admission script of this partition and epoch, so that
--                     a gateway can tell a missing version from a closed door
-- ARGV[5] run_id      the server's run id, so that a restart can be told later
--
-- Returns {'OPEN'}; {'MISSING'} or {'STALE_EPOCH', epoch} without effect, and
-- {'FAULTY', reason} where a fault closed the partition, perhaps while a
-- guardian was proving its ledger: what went wrong need not show in any figure.

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'reason')
if not meta[1] then
  return {'MISSING'}
end
if meta[1] ~= ARGV[1] then
  return {'STALE_EPOCH', meta[1]}
end
if meta[2] == 'closed' and string.sub(meta[3] or '', 1, 7) == 'fault: ' then
  return {'FAULTY', meta[3]}
end
redis.call('HSET', KEYS[1], 'state', 'open', 'reason', '', 'durability', ARGV[2], 'bound', ARGV[3], 'admit_sha', ARGV[4], 'run_id', ARGV[5])
return {'OPEN'}
