//! Tables like those of TPC-H, in Parquet files of a store: `lineitem`, in several files, and
//! `orders`.

use std::sync::Arc;

use anyhow::Result;
use datafusion::arrow::array::{ArrayRef, Float64Array, Int32Array, Int64Array, StringArray};
use datafusion::arrow::record_batch::RecordBatch;
use datafusion::parquet::arrow::ArrowWriter;
use datafusion::parquet::file::properties::WriterProperties;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

/// Rows of `lineitem` for each row of `orders`.
const LINES: u64 = 4;
/// Rows of a row group, which is one read of each of its columns.
const GROUP_ROWS: usize = 64 << 10;
/// Days of the dates, which are numbers from 0 on.
const DAYS: i32 = 2500;

/// Puts the tables into a store: `lineitem` with this many rows in each of this many files, a
/// quarter as many in `orders`. Returns their length in bytes.
pub async fn create(store: &dyn ObjectStore, files: u64, rows: u64) -> Result<u64> {
    let mut bytes = 0;
    for file in 0..files {
        let mut random = fastrand::Rng::with_seed(file);
        let lines = lines(&mut random, file * rows..(file + 1) * rows)?;
        let first = file * rows / LINES;
        let orders = orders(&mut random, first..first + rows / LINES)?;
        for (table, batch) in [("lineitem", lines), ("orders", orders)] {
            let parquet = parquet(&batch)?;
            bytes += parquet.len() as u64;
            let location = Path::from(format!("{table}/part-{file}.parquet"));
            store.put(&location, parquet.into()).await?;
        }
    }
    Ok(bytes)
}

fn lines(random: &mut fastrand::Rng, rows: std::ops::Range<u64>) -> Result<RecordBatch> {
    let count = rows.end - rows.start;
    let orders = Int64Array::from_iter_values(rows.map(|row| (row / LINES) as i64));
    let mut floats = |least: u64, most: u64, unit: f64| {
        let value = |_| random.u64(least..=most) as f64 * unit;
        Arc::new(Float64Array::from_iter_values((0..count).map(value))) as ArrayRef
    };
    let quantities = floats(1, 50, 1.0);
    let prices = floats(90_000, 10_000_000, 0.01);
    let (discounts, taxes) = (floats(0, 10, 0.01), floats(0, 8, 0.01));
    let mut days = |least: i32| {
        let days = (0..count).map(|_| random.i32(least..DAYS));
        Arc::new(Int32Array::from_iter_values(days)) as ArrayRef
    };
    let (shipped, committed) = (days(0), days(20));
    let mut words = |words: &[&str]| {
        let word = |_| words[random.usize(..words.len())];
        Arc::new(StringArray::from_iter_values((0..count).map(word))) as ArrayRef
    };
    let (flags, statuses) = (words(&["A", "N", "R"]), words(&["F", "O"]));
    let comments = (0..count).map(|_| format!("{:x}", random.u128(..)));
    Ok(RecordBatch::try_from_iter([
        ("l_orderkey", Arc::new(orders) as ArrayRef),
        ("l_quantity", quantities),
        ("l_extendedprice", prices),
        ("l_discount", discounts),
        ("l_tax", taxes),
        ("l_shipdate", shipped),
        ("l_commitdate", committed),
        ("l_returnflag", flags),
        ("l_linestatus", statuses),
        ("l_comment", Arc::new(StringArray::from_iter_values(comments))),
    ])?)
}

fn orders(random: &mut fastrand::Rng, rows: std::ops::Range<u64>) -> Result<RecordBatch> {
    let count = rows.end - rows.start;
    let keys = Int64Array::from_iter_values(rows.map(|row| row as i64));
    let customers = (0..count).map(|_| random.i64(0..count as i64 / 10 + 1));
    let customers = Int64Array::from_iter_values(customers);
    let dates = Int32Array::from_iter_values((0..count).map(|_| random.i32(0..DAYS)));
    let priorities = ["1-URGENT", "2-HIGH", "3-MEDIUM", "4-LOW"];
    let priorities = (0..count).map(|_| priorities[random.usize(..priorities.len())]);
    Ok(RecordBatch::try_from_iter([
        ("o_orderkey", Arc::new(keys) as ArrayRef),
        ("o_custkey", Arc::new(customers)),
        ("o_orderdate", Arc::new(dates)),
        ("o_orderpriority", Arc::new(StringArray::from_iter_values(priorities))),
    ])?)
}

fn parquet(batch: &RecordBatch) -> Result<Vec<u8>> {
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(GROUP_ROWS));
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties.build()))?;
    writer.write(batch)?;
    Ok(writer.into_inner()?)
}
