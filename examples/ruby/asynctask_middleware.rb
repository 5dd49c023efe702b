# frozen_string_literal: true

# Makes Sidekiq record the outcomes of its jobs in AsyncTask. Require this in the application of the worker process, and set
# ASYNCTASK_URL to the address of `asynctask web` (with tokens, http://NAME:SECRET@HOST:PORT). Jobs whose payload has `use_task_event` are recorded: those of Tasks, and
# those of classes with `sidekiq_options use_task_event: true`. docs/how-to/other-languages.md has the promises.
require "json"
require "net/http"
require "securerandom"
require "sidekiq"
require "socket"

module AsyncTask
  class NormalException < StandardError; end # the business refuses: `failed`, never retried

  # All threads share the requests of one sender, and each waits for the response to its record: the outcome is committed
  # before Sidekiq acknowledges the job. Without a response, the jobs wait.
  class Reporter
    def initialize(url)
      @uri = URI.join(url, "/api/records")
      @headers = { "Content-Type" => "application/json" }
      @headers["Authorization"] = "Basic #{[@uri.userinfo].pack("m0")}" if @uri.userinfo
      @queue = Queue.new
      @working = {}
    end

    def start(concurrency, queues)
      @process = { engine: "sidekiq", name: new_name, concurrency: concurrency, queues: queues.uniq }
      @sender = Thread.new { nil while send_next }
      Thread.new { beat while sleep(1) }
    end

    def change(facts)
      @process = @process.merge(facts)
      @queue << nil
    end

    def stop
      change(ended: true)
      @queue << :stop
      @sender.join(5)
    end

    # The record of a running job, once it has run for a second.
    def working(said)
      @working[Thread.current] = { said: said, since: Time.now, told: false }
      yield
    ensure
      @working.delete(Thread.current)
    end

    # Whether the record counts; returns once it is committed.
    def record(said)
      @queue << [said, answer = Queue.new]
      result = answer.pop
      result["job_id"] ? result["counted"] : raise("AsyncTask refuses a record: #{result}")
    end

    private

    # A process that is silent for longer than lease_s counts as dead.
    def beat
      @working.values.each do |job|
        next if job[:told] || Time.now - job[:since] < 1

        job[:told] = true
        @queue << [job[:said], Queue.new]
      end
      @queue << nil
    end

    def send_next
      batch = [@queue.pop]
      batch << @queue.pop(true) while batch.size < 500 && !@queue.empty?
      deliver(batch.grep(Array))
      !batch.include?(:stop)
    end

    def deliver(waiting)
      answer = post(JSON.generate(records: waiting.map(&:first), process: @process.merge(busy: @working.size)))
      said = JSON.parse(answer.body)
      if answer.is_a?(Net::HTTPOK)
        waiting.zip(said["results"]) { |(_, thread), result| thread << result }
        Process.kill({ "quiet" => "TSTP", "stop" => "TERM" }[said["signal"]], Process.pid) if said["signal"]
      elsif said["code"] == "process_lost" # silent for too long: its jobs were given to others
        @process = @process.merge(name: new_name)
        deliver(waiting)
      elsif waiting.size > 1 # send them singly, so that a wrong record affects no other
        waiting.each { |each| deliver([each]) }
      else
        Sidekiq.logger.error("AsyncTask refuses a request: #{answer.body}")
        waiting.each { |_, thread| thread << said }
      end
    end

    def post(body)
      @http ||= Net::HTTP.start(@uri.host, @uri.port, use_ssl: @uri.scheme == "https")
      answer = @http.post(@uri.path, body, @headers)
      case answer
      when Net::HTTPServerError, Net::HTTPUnauthorized, Net::HTTPForbidden then raise(answer.message)
      else answer
      end
    rescue StandardError => error
      Sidekiq.logger.warn("AsyncTask does not answer: #{error.message}")
      @http = nil
      sleep 0.2
      retry # a repeated record counts once
    end

    def new_name
      "#{Socket.gethostname[/[\w.-]{1,30}/]}:#{Process.pid}:#{SecureRandom.hex(6)}"
    end
  end

  class Middleware
    FRESH_S = 0.5

    def initialize(reporter)
      @reporter = reporter
    end

    def call(worker, job, queue, &code)
      return yield unless job["use_task_event"]

      # The ledger keeps and retries a job that carries an attempt; Sidekiq any other.
      attempt = job.dig("asynctask", "attempt")
      about = { job_id: job["jid"], attempt: attempt, worker: job["wrapped"] || job["class"], queue: queue,
                started_at: Time.now.utc.strftime("%FT%T.%LZ") }
      about[:args] = job["args"] unless attempt
      began = { **about, status: "working" }
      # A copy of an older attempt, or of a Task that is paused or cancelled, is not performed. One that was dispatched just
      # now is neither. A job of several items is refused by the answer, and ends in an error.
      is_fresh = (Time.now.to_f - job["enqueued_at"].to_f).between?(0, FRESH_S) && !job["items"]
      return if attempt && !is_fresh && !@reporter.record(began)

      @reporter.working(began) { perform(worker, job, about, &code) }
    end

    private

    def perform(worker, job, about)
      yield
      @reporter.record({ **about, status: "finish" })
    rescue NormalException => error
      @reporter.record({ **about, status: "failed", message: text(error) })
    rescue Exception => error # rubocop:disable Lint/RescueException -- as Sidekiq does
      raise if error.is_a?(Sidekiq::JobRetry::Handled)

      if error.is_a?(Sidekiq::Shutdown) || error.cause.is_a?(Sidekiq::Shutdown)
        @reporter.record({ **about, status: "interrupted" })
        raise
      end
      seconds = retry_in(worker, job, error)
      counts = @reporter.record({ **about, status: "error", message: text(error, "#{error.class}: "), will_retry: !!seconds,
                                  retry_at: seconds && (Time.now + seconds).utc.strftime("%FT%T.%LZ") })
      # Handled: error handlers are called, and Sidekiq does not retry it, because the ledger does.
      raise Sidekiq::JobRetry::Handled if about[:attempt] && (seconds || !counts)

      raise
    end

    # Seconds until the retry that Sidekiq would make; nil for none.
    def retry_in(worker, job, error)
      count = job["retry_count"] ? job["retry_count"] + 1 : 0
      most = job["retry"].is_a?(Integer) ? job["retry"] : 25
      return if !job["retry"] || count >= most

      own = worker.class.sidekiq_retry_in_block&.call(count, error, job) if worker.class.respond_to?(:sidekiq_retry_in_block)
      own.is_a?(Symbol) ? nil : (own.to_i.positive? ? own.to_i : count**4 + 15) + rand(10) * (count + 1)
    end

    def text(error, before = "")
      "#{before}#{error.message}".encode("UTF-8", invalid: :replace, undef: :replace).scrub[0, 10_000]
    end
  end
end

Sidekiq.configure_server do |config|
  reporter = AsyncTask::Reporter.new(ENV.fetch("ASYNCTASK_URL", "http://127.0.0.1:8000"))
  config.server_middleware { |chain| chain.add(AsyncTask::Middleware, reporter) }
  config.on(:startup) do
    facts = config.respond_to?(:capsules) ? config.capsules.values.map { |c| [c.concurrency, c.queues] } : nil
    facts ||= [config.options.values_at(:concurrency, :queues)] # Sidekiq 6
    reporter.start(facts.sum(&:first), facts.flat_map(&:last))
    at_exit { reporter.stop }
  end
  config.on(:quiet) { reporter.change(quiet: true) }
end
