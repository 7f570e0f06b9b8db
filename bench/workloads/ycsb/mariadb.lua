-- SPDX-License-Identifier: Apache-2.0
-- ReadRecord and UpdateRecord for sysbench on MariaDB: the statements and the keys of the pgbench scripts beside this one.

sysbench.cmdline.options = {
   reads = {"Reads in a hundred transactions; the others are updates", 90},
   rows = {"Keys", 100000},
   -- Constants of the key distribution, which the bench computes; a default with a fraction makes an option a fraction.
   zetan = {"zeta(rows) for theta 0.99", 0.5},
   eta = {"eta of Gray's approximation", 0.5},
}

local connection

function thread_init()
   connection = sysbench.sql.driver():connect()
end

function thread_done()
   connection:disconnect()
end

-- Gray's approximation of a Zipf distribution with theta 0.99, as BenchBase draws it.
local function key()
   local u = sysbench.rand.uniform_double()
   local uz = u * sysbench.opt.zetan
   if uz < 1 then return 0 end
   if uz < 1 + 0.5 ^ 0.99 then return 1 end
   local drawn = math.floor(sysbench.opt.rows * (sysbench.opt.eta * u - sysbench.opt.eta + 1) ^ 100)
   return math.min(drawn, sysbench.opt.rows - 1)
end

local function update(seed)
   local fields = {}
   for n = 1, 10 do
      fields[n] = string.format("field%d = substr(repeat(md5(concat('%d', '%d')), 4), 1, 100)", n, seed, n)
   end
   return "update usertable set " .. table.concat(fields, ", ")
end

function event()
   local where = string.format(" where ycsb_key = %d", key())
   if sysbench.rand.uniform(1, 100) <= sysbench.opt.reads then
      connection:query("select * from usertable" .. where):free()
   else
      connection:query(update(sysbench.rand.uniform(1, 1000000000)) .. where)
   end
end
