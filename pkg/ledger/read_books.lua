#!lua flags=no-writes
-- read_books: the figures of a voucher and its partition, all of one moment.
--
-- KEYS[1] meta     hash of the partition
-- KEYS[2] voucher  hash of the voucher
-- KEYS[3] buyers   hash, user_id -> mark
-- KEYS[4] orders   stream of the partition
--
-- Returns {now_ms, HLEN of buyers, XLEN of orders, meta..., voucher...}: the
-- values of meta's epoch, state, admitted, settled, entries_in, entries_out,
-- then of voucher's state, rev, stock, opening, seq, returned, settled,
-- carried, removed; nil where one is missing is an empty string.

local time = redis.call('TIME')
local reply = {time[1] * 1000 + math.floor(time[2] / 1000), redis.call('HLEN', KEYS[3]), redis.call('XLEN', KEYS[4])}
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'admitted', 'settled', 'entries_in', 'entries_out')
for i = 1, 6 do
  reply[#reply + 1] = meta[i] or ''
end
local voucher = redis.call('HMGET', KEYS[2], 'state', 'rev', 'stock', 'opening', 'seq', 'returned', 'settled', 'carried', 'removed')
for i = 1, 9 do
  reply[#reply + 1] = voucher[i] or ''
end
return reply
