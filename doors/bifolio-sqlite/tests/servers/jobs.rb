# Does the jobs that the server has noted in the database, as Solid Queue does: asks for the next one.
# Ends at SIGTERM.

require_relative 'accounts'

ends = false
trap('TERM') { ends = true }
until ends
  job = immediately do
    Job.order(:id).first&.tap do |found|
      move(found.source, found.target)
      found.delete
    end
  end
  sleep(0.02) unless job
end
