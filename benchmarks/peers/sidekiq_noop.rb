# Sidekiq's side of benchmarks/noop.py: a job that does nothing but be counted, and a thread that tells how many were.
require "sidekiq"
require "redis"

$performed = 0

class Noop
  include Sidekiq::Worker

  def perform(_n)
    $performed += 1
  end
end

Thread.new do
  redis = Redis.new(url: ENV.fetch("REDIS_URL"))
  told = 0
  loop do
    redis.set("benchmark:performed", told = $performed) if $performed != told
    sleep 0.01
  end
end
