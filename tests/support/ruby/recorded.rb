# frozen_string_literal: true

# Jobs that Ruby's Sidekiq performs and AsyncTask records, by the middleware of the examples.
require_relative "jobs"
require_relative "../../../examples/ruby/asynctask_middleware"

module Shop
  # What an item comes to is in its SKU. Leaves in the list test:performed which it was, each time that it begins.
  class Enroll
    include Sidekiq::Worker
    sidekiq_options queue: "ruby", use_task_event: true, retry: 1
    sidekiq_retry_in { 3600 }
    sidekiq_retries_exhausted { |job, _error| Shop.redis { |connection| connection.rpush("test:exhausted", job["jid"]) } }

    def perform(item)
      sku = item["sku"]
      Shop.redis { |connection| connection.rpush("test:performed", sku) }
      raise AsyncTask::NormalException, "seller is not qualified: \u00e9" if sku.start_with?("NO")
      raise ArgumentError, "cannot read #{sku}" if sku.start_with?("BUG")
      return unless sku.start_with?("GATE")

      sleep 0.02 until Shop.redis { |connection| connection.get("test:gate") }
      raise ArgumentError, "not yet" if Shop.redis { |connection| connection.get("test:gate") } == "fail"
    end
  end

  def self.redis(&code)
    Sidekiq.redis(&code)
  end
end
