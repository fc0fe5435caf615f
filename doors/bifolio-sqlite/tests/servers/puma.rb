# Serves config.ru with a cluster of puma, whose workers are forked after the application has opened
# the database, beside two processes of jobs.rb:
#
#     ruby puma.rb EXTENSION FOLDER
#
# Each process has one thread that uses the database: SQLite's busy handler waits with the lock of the
# interpreter, so that a second thread, which has the transaction, could not end it.
#
# Exits with an error if a request failed, a sum was not 0, an answered change is lost, or the
# database is damaged.

require 'net/http'
require 'sqlite3'

EXTENSION, FOLDER = ARGV
ACCOUNTS = 2000
CLIENTS = 6
SECONDS = 6
PATH = File.join(FOLDER, 'x.db')
LOG = File.join(FOLDER, 'log.txt')

def make
  database = SQLite3::Database.new(PATH)
  database.execute_batch(<<~SQL)
    pragma journal_mode=wal;
    create table account(id integer primary key, amount integer, filler text);
    create table visit(id integer primary key, process integer);
    create table job(id integer primary key, source integer, target integer);
    with recursive i(id) as (select 0 union all select id + 1 from i where id < #{ACCOUNTS} - 1)
      insert into account select id, 0, hex(zeroblob(100)) from i;
  SQL
  database.close
end

def start(*command)
  variables = { 'DOOR' => EXTENSION, 'DATABASE' => PATH, 'BIFOLIO_DEFAULT' => '1' }
  Process.spawn(variables, *command, chdir: __dir__, out: [LOG, 'a'], err: [LOG, 'a'])
end

def ask(port, path)
  answer = Net::HTTP.get_response('127.0.0.1', path, port)
  raise "#{path}: #{answer.code} #{answer.body}" unless answer.code == '200'

  answer.body
end

def wait_for(what)
  300.times do
    return if yield

    sleep(0.1)
  end
  raise "#{what}: not within 30 s"
end

def serves?(port)
  ask(port, '/total') == '0'
rescue SystemCallError
  false
end

def client(port, until_time)
  changes = 0
  while Process.clock_gettime(Process::CLOCK_MONOTONIC) < until_time
    accounts = "#{rand(ACCOUNTS)}/#{rand(ACCOUNTS)}"
    case rand(10)
    when 0..2 then ask(port, "/move/#{accounts}") && changes += 1
    when 3..4 then ask(port, "/later/#{accounts}") && changes += 1
    else raise 'half a change was seen' unless ask(port, '/total') == '0'
    end
  end
  changes
end

make
port = rand(20_000...30_000)
processes = [start('puma', '--workers', '4', '--threads', '1:1', '--preload', '--bind',
                   "tcp://127.0.0.1:#{port}", 'config.ru')]
begin
  wait_for('the server') { serves?(port) }
  processes += Array.new(2) { start('ruby', 'jobs.rb') }
  end_time = Process.clock_gettime(Process::CLOCK_MONOTONIC) + SECONDS
  changes = Array.new(CLIENTS) { Thread.new { client(port, end_time) } }.sum(&:value)
  database = SQLite3::Database.new(PATH)
  wait_for('the jobs') { database.get_first_value('select count(*) from job').zero? }
ensure
  processes.each { |process| Process.kill('TERM', process) }
  processes.each { |process| Process.wait(process) }
  problems = File.read(LOG)
  warn(problems[-4000..] || problems) if $!
end
visits, workers = database.get_first_row('select count(*), count(distinct process) from visit')
found = [database.get_first_value('select sum(amount) from account'), visits,
         database.get_first_value('pragma integrity_check')]
raise "#{found} of #{changes} answered changes, by #{workers} processes" if found != [0, changes, 'ok'] || workers < 4

puts "puma: #{changes} changes by #{workers} processes"
