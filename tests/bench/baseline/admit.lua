-- The tutorial's script. Keys are built inside, as there.
-- ARGV[1] voucher_id  ARGV[2] user_id  ARGV[3] order_id (stage stream)
-- Returns 0 admitted, 1 sold out, 2 the user has an order.
local voucherId = ARGV[1]
local userId = ARGV[2]
local orderId = ARGV[3]
local stockKey = 'seckill:stock:' .. voucherId
local orderKey = 'seckill:order:' .. voucherId
if tonumber(redis.call('get', stockKey)) <= 0 then
  return 1
end
if redis.call('sismember', orderKey, userId) == 1 then
  return 2
end
redis.call('incrby', stockKey, -1)
redis.call('sadd', orderKey, userId)
if orderId then
  redis.call('xadd', 'stream.orders', '*', 'userId', userId, 'voucherId', voucherId, 'id', orderId)
end
return 0
