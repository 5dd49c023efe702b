# The original design of a tracked job: a Task has Events, one for each job, and a middleware around the job looks its Event up
# by job_id and saves it, when the job begins and when it ends, each save a commit. Run by benchmarks/original_design.py:
# `ruby sidekiq_tracked.rb N` makes the tables and hands N jobs in, `sidekiq -r sidekiq_tracked.rb` performs them.
require "active_record"
require "sidekiq"

ActiveRecord::Base.establish_connection(ENV.fetch("PEER_DATABASE_URL"))

class Task < ActiveRecord::Base
  self.table_name = "peer_tasks"
  has_many :events
end

class Event < ActiveRecord::Base
  self.table_name = "peer_events"
  belongs_to :task
  validates :job_id, uniqueness: true

  def self.note(jid, status, message)
    event = find_by!(job_id: jid)
    event.status = status
    event.messages += [{ at: Time.now.to_f, status: status, message: message }]
    event.save!
  end
end

class Recording
  def call(_worker, job, _queue)
    Event.note(job["jid"], "working", "In progress")
    yield
    Event.note(job["jid"], "finish", "Done")
  end
end

class Noop
  include Sidekiq::Worker
  sidekiq_options retry: false

  def perform(_n); end
end

Sidekiq.configure_server do |config|
  config.server_middleware { |chain| chain.add Recording }
end

if $PROGRAM_NAME == __FILE__
  ActiveRecord::Schema.verbose = false
  ActiveRecord::Schema.define do
    create_table(:peer_tasks) { |t| t.string :worker_name }
    create_table(:peer_events) do |t|
      t.references :task
      t.string :job_id, index: { unique: true }
      t.string :status
      t.jsonb :params
      t.jsonb :messages, default: []
      t.timestamps
    end
  end
  task = Task.create!(worker_name: "Noop")
  Integer(ARGV.fetch(0)).times do |n|
    Event.create!(task: task, job_id: Noop.perform_async(n), status: "enqueue", params: { n: n })
  end
end
