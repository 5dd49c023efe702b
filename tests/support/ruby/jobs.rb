# frozen_string_literal: true

# An application of Ruby's Sidekiq and ActiveJob: what `sidekiq -r` runs in the tests, and what desk.rb pushes.
require "json"
require "time"
require "sidekiq"
require "sidekiq/launcher"
require "active_support/all"
require "active_job"
require "active_job/base"
require "global_id"

# A test waits for what happens, so nothing may take its time: beats and looks of the poller come at once.
Sidekiq::Launcher.send(:remove_const, :BEAT_PAUSE)
Sidekiq::Launcher.const_set(:BEAT_PAUSE, 0.2)
Sidekiq.options[:poll_interval_average] = 0.1
Sidekiq::Scheduled::Poller.class_eval { def initial_wait; end }

GlobalID.app = "shop"
ActiveJob::Base.queue_adapter = :sidekiq
ActiveJob::Base.logger = Logger.new(nil)

module Shop
  # Leaves in the list test:ruby what was performed, as JSON.
  def self.note(facts)
    Sidekiq.redis { |connection| connection.rpush("test:ruby", Sidekiq.dump_json(facts)) }
  end

  # Every job as the server middleware gets it, once it has been performed.
  class Noted
    def call(_worker, job, queue)
      yield
      Shop.note("job" => job, "queue" => queue)
    end
  end

  class Echo
    include Sidekiq::Worker

    def perform(*_args)
    end
  end

  # Of Ruby alone: ours do not know it.
  class Only
    include Sidekiq::Worker

    def perform(*_args)
    end
  end

  # Is still at it when its process is stopped.
  class Slow
    include Sidekiq::Worker

    def perform(*_args)
      sleep
    end
  end

  # Fails until somebody sets the key test:mended.
  class Flaky
    include Sidekiq::Worker
    sidekiq_options backtrace: true

    def perform(*_args)
      raise ArgumentError, "wrong: é" unless Sidekiq.redis { |connection| connection.get("test:mended") }
    end
  end

  # A record without a database.
  User = Struct.new(:id) do
    include GlobalID::Identification

    def self.find(id)
      new(Integer(id))
    end
  end

  class Mail < ActiveJob::Base
    queue_as :ruby

    def perform(*args, **options)
      Shop.note(
        "arguments" => ActiveJob::Arguments.serialize(args), "options" => ActiveJob::Arguments.serialize([options]),
        "classes" => args.map { |arg| arg.class.name }, "job_id" => job_id, "provider" => provider_job_id
      )
    end
  end
end

Sidekiq.configure_server do |config|
  config.server_middleware { |chain| chain.add(Shop::Noted) }
end
