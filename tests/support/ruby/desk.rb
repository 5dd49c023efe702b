# frozen_string_literal: true

# Ruby that stays: each line that comes is base64 of a JSON array, the URL of a Redis server, a script and its words; the
# answer is a line with "=" and the JSON of what the script came to, or with "!" and what went wrong.
OUT = $stdout.dup
OUT.sync = true
$stdout.reopen($stderr)

begin
  require_relative "jobs"
  require "sidekiq/api"
  require "sidekiq/web"
  require "sidekiq/processor"
  require "rack/mock"
rescue LoadError => error
  OUT.puts("?#{error.message}")
  exit
end

Sidekiq.logger.level = Logger::FATAL

# What a script is run in: `words`, and Sidekiq's pages as a browser with one session sees them.
class Desk
  attr_reader :words, :answered

  def initialize(words)
    @words = words
    @web = Rack::MockRequest.new(Sidekiq::Web)
    @session = {}
  end

  # What the script gives, where it is not what it ends with.
  def answer(value)
    @answered = value
  end

  def get(path, **headers)
    @web.get(path, "rack.session" => @session, **headers)
  end

  # Sends the form of a page, with the token that stands in it.
  def press(page, to, fields)
    token = get(page).body[/name='authenticity_token' value='([^']+)'/, 1]
    post(to, fields.merge("authenticity_token" => token))
  end

  def post(path, fields)
    @web.post(path, "rack.session" => @session, :params => fields)
  end

  # Takes one job from a queue as a worker process does; what it raises is not raised here.
  def perform(queue)
    options = { queues: [queue], concurrency: 1 }
    processor = Sidekiq::Processor.new(nil, options.merge(fetch: Sidekiq::BasicFetch.new(options)))
    processor.send(:process_one)
  rescue ArgumentError
    nil
  end
end

at = nil
OUT.puts("=true")
while (line = $stdin.gets)
  url, script, words = JSON.parse(line.unpack1("m").force_encoding("UTF-8"))
  begin
    Sidekiq.redis = { url: url } if url != at
    at = url
    ARGV.replace(words.map(&:to_s))
    desk = Desk.new(words)
    value = desk.instance_eval(script)
    value = desk.answered unless desk.answered.nil?
    plain = [NilClass, TrueClass, FalseClass, Numeric, String, Array, Hash].any? { |kind| value.is_a?(kind) }
    OUT.puts("=#{JSON.generate([plain ? value : nil])}")
  rescue StandardError, ScriptError => error
    OUT.puts("!#{JSON.generate([error.full_message(highlight: false)])}")
  end
end
