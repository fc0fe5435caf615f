//! Queries like those of TPC-H, and what each of them cost.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Result;
use bifolio_object_store::{CachedStore, Metrics};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::prelude::{ParquetReadOptions, SessionContext};

/// Where the tables are; a store is registered under it.
pub const TABLES_URL: &str = "s3://tables";

/// Names and texts of the queries.
pub const QUERIES: [(&str, &str); 6] = [
    (
        "pricing summary",
        "SELECT l_returnflag, l_linestatus, round(sum(l_quantity)) AS quantity, \
         round(sum(l_extendedprice * (1 - l_discount) * (1 + l_tax))) AS charge, count(*) AS lines \
         FROM lineitem WHERE l_shipdate <= 2400 GROUP BY 1, 2 ORDER BY 1, 2",
    ),
    (
        "revenue of a year",
        "SELECT round(sum(l_extendedprice * l_discount)) AS revenue FROM lineitem \
         WHERE l_shipdate BETWEEN 700 AND 1064 AND l_discount BETWEEN 0.05 AND 0.07 \
         AND l_quantity < 24",
    ),
    (
        "shipping priority",
        "SELECT l_orderkey, round(sum(l_extendedprice * (1 - l_discount))) AS revenue, o_orderdate \
         FROM lineitem JOIN orders ON l_orderkey = o_orderkey \
         WHERE o_orderdate < 1200 AND l_shipdate > 1200 \
         GROUP BY l_orderkey, o_orderdate ORDER BY revenue DESC, l_orderkey LIMIT 10",
    ),
    (
        "late orders",
        "SELECT o_orderpriority, count(*) AS orders FROM orders WHERE EXISTS \
         (SELECT 1 FROM lineitem WHERE l_orderkey = o_orderkey AND l_commitdate < l_shipdate) \
         GROUP BY 1 ORDER BY 1",
    ),
    (
        "largest customers",
        "SELECT o_custkey, count(*) AS orders FROM orders GROUP BY 1 \
         ORDER BY orders DESC, o_custkey LIMIT 5",
    ),
    (
        "lines of an order",
        "SELECT l_orderkey, l_quantity, l_comment FROM lineitem WHERE l_orderkey = 777 \
         ORDER BY l_comment",
    ),
];

/// Registers the tables of the store under [`TABLES_URL`].
pub async fn register_tables(context: &SessionContext) -> Result<()> {
    for table in ["lineitem", "orders"] {
        let url = format!("{TABLES_URL}/{table}/");
        context.register_parquet(table, url, ParquetReadOptions::default()).await?;
    }
    Ok(())
}

/// Runs a query. Returns its answer as a table of text.
pub async fn answer(context: &SessionContext, query: &str) -> Result<String> {
    let batches = context.sql(query).await?.collect().await?;
    Ok(pretty_format_batches(&batches)?.to_string())
}

/// What a query cost.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Time from the text to the answer.
    pub time: Duration,
    /// Counts of the store.
    pub metrics: Metrics,
}

impl Cost {
    /// Runs a query over `store`, and returns its answer and what it cost.
    pub async fn of(
        context: &SessionContext,
        store: &CachedStore,
        query: &str,
    ) -> Result<(String, Self)> {
        let (before, started) = (store.metrics(), Instant::now());
        let answer = answer(context, query).await?;
        let (time, metrics) = (started.elapsed(), store.metrics().since(&before));
        Ok((answer, Self { time, metrics }))
    }

    /// The head of a table of costs.
    pub const HEAD: &'static str = "                        ms  requests  received MiB  hits: \
         memory    disk  shared  misses  waited ms: store    disk";
}

impl fmt::Display for Cost {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let metrics = &self.metrics;
        let requests = metrics.get_requests + metrics.head_requests + metrics.list_requests;
        write!(
            formatter,
            "{:>8} {requests:>9} {:>13.1} {:>13} {:>7} {:>7} {:>7} {:>17} {:>7}",
            self.time.as_millis(),
            metrics.received_bytes as f64 / (1 << 20) as f64,
            metrics.memory_hits,
            metrics.disk_hits,
            metrics.shared,
            metrics.misses,
            metrics.store_wait_us / 1000,
            metrics.disk_wait_us / 1000,
        )
    }
}
