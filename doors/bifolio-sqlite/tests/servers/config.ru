# Serves accounts.rb: changes at once, and changes that a process of jobs.rb makes later.

require_relative 'accounts'

# A connection that is opened before the workers are forked.
Account.count

run(lambda do |environment|
  _, kind, source, target = environment['PATH_INFO'].split('/')
  text = ActiveRecord::Base.connection_pool.with_connection do
    case kind
    when 'move' then immediately { move(source.to_i, target.to_i) } && 'moved'
    when 'later' then Job.create!(source: source.to_i, target: target.to_i) && 'noted'
    else Account.sum(:amount).to_s
    end
  end
  [200, { 'Content-Type' => 'text/plain' }, [text]]
rescue StandardError => problem
  [500, { 'Content-Type' => 'text/plain' }, [problem.full_message(highlight: false)]]
end)
