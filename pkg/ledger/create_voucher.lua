#!lua
-- create_voucher: makes the ledger of a voucher as a draft, which sells
-- nothing. Done once per epoch: the database notes that it was done before the
-- voucher is opened, and from then on a missing ledger is a lost one.
--
-- KEYS[1] meta      hash of the partition
-- KEYS[2] voucher   hash of the voucher
-- KEYS[3] buyers    hash, user_id -> mark
-- KEYS[4] outcomes  hash, seq -> user:kind:standing
-- ARGV[1] epoch     the partition's epoch
-- ARGV[2] opening   units to begin with
-- ARGV[3] begin_ms  window, inclusive
-- ARGV[4] end_ms    window, exclusive
--
-- Returns {'CREATED'}; {'EXISTS'} where the voucher's ledger is there;
-- {'MISSING'} or {'STALE_EPOCH', epoch} of the partition; all but the first
-- without effect. An error where marks or outcomes lie there without a voucher.

local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  return {'MISSING'}
end
if epoch ~= ARGV[1] then
  return {'STALE_EPOCH', epoch}
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('HGET', KEYS[2], 'state')
  return {'EXISTS'}
end
if redis.call('EXISTS', KEYS[3], KEYS[4]) > 0 then
  return redis.error_reply('LEDGER_FAULT marks or outcomes without a voucher')
end
redis.call('HSET', KEYS[2], 'state', 'draft', 'rev', '0', 'stock', ARGV[2], 'opening', ARGV[2], 'seq', '0',
  'returned', '0', 'settled', '0', 'carried', '0', 'removed', '0', 'begin_ms', ARGV[3], 'end_ms', ARGV[4])
return {'CREATED'}
