# Accounts whose sum stays 0, over Active Record: what the processes of puma.rb share.
#
# `DOOR` in the environment names the extension of SQLite to load, with `BIFOLIO_DEFAULT=1`.

require 'active_record'
require 'sqlite3'

if (path = ENV.fetch('DOOR', '')) != ''
  loader = SQLite3::Database.new(':memory:')
  loader.enable_load_extension(true)
  loader.load_extension(path)
  loader.close
end

ActiveRecord::Base.establish_connection(
  adapter: 'sqlite3', database: ENV.fetch('DATABASE'), timeout: 10_000, pool: 8
)

class Account < ActiveRecord::Base
  self.table_name = 'account'
end

class Visit < ActiveRecord::Base
  self.table_name = 'visit'
end

class Job < ActiveRecord::Base
  self.table_name = 'job'
end

# Runs a block in a transaction that may write from its begin, as Rails does from version 8 on.
def immediately
  connection = ActiveRecord::Base.connection
  connection.execute('begin immediate')
  result = yield
  connection.execute('commit')
  result
rescue StandardError
  connection.execute('rollback') if connection.raw_connection.transaction_active?
  raise
end

def move(source, target)
  Account.where(id: source).update_all('amount=amount-1')
  Account.where(id: target).update_all('amount=amount+1')
  Visit.insert({ process: Process.pid })
end
