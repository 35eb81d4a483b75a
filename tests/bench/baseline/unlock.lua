-- KEYS[1] the lock  ARGV[1] its holder's token
-- Returns 1 if it was released.
if redis.call('get', KEYS[1]) == ARGV[1] then
  return redis.call('del', KEYS[1])
end
return 0
