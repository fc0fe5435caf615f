//! DataFusion over an object store that is cached in memory and on disk: queries over Parquet files
//! on an S3-compatible server, which the example starts on the loopback.
//!
//! Runs the queries three times: with an empty cache, again, and after the store was opened anew,
//! as by a second process. Prints what each query cost.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use bifolio::Cache;
use bifolio_datafusion::queries::{Cost, QUERIES, TABLES_URL, register_tables};
use bifolio_datafusion::server::{Server, connect};
use bifolio_datafusion::tables;
use bifolio_object_store::CachedStore;
use clap::Parser;
use datafusion::prelude::SessionContext;
use url::Url;

#[derive(Debug, Parser)]
struct Arguments {
    /// Files of the larger table.
    #[arg(long, default_value_t = 4)]
    files: u64,
    /// Rows of each of them.
    #[arg(long, default_value_t = 250_000)]
    rows: u64,
    /// Memory of the cache, MiB.
    #[arg(long, default_value_t = 16)]
    memory_mib: u64,
    /// Disk tier, MiB.
    #[arg(long, default_value_t = 1024)]
    disk_mib: u64,
    /// Directory of the disk tier, and of the server; a temporary one by default.
    #[arg(long)]
    directory: Option<PathBuf>,
    /// Time after which the server answers, ms.
    #[arg(long, default_value_t = 20)]
    latency_ms: u64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let temporary = tempfile::tempdir()?;
    let directory = arguments.directory.clone().unwrap_or(temporary.path().to_owned());
    let latency = Duration::from_millis(arguments.latency_ms);
    let server = Server::start(&directory.join("server"), latency).await?;
    let bucket = connect(&server.endpoint())?;
    let bytes = tables::create(&bucket, arguments.files, arguments.rows).await?;
    println!("{} MiB of Parquet on {}", bytes >> 20, server.endpoint());
    let mut answers = Vec::new();
    for runs in [&["first run", "second run"][..], &["after a restart"]] {
        let cache = Cache::builder().memory(arguments.memory_mib << 20).build()?;
        let disk = directory.join("tier");
        let age = Duration::from_secs(600);
        let bucket = Arc::clone(&bucket);

        // The three lines.
        let builder = CachedStore::builder(bucket, &cache).disk(disk, arguments.disk_mib << 20);
        let store = builder.head_age(age).build()?;
        let context = SessionContext::new();
        context.register_object_store(&Url::parse(TABLES_URL)?, Arc::new(store.clone()));

        register_tables(&context).await?;
        for title in runs {
            println!("\n{title}\n{}", Cost::HEAD);
            for (name, query) in QUERIES {
                let (answer, cost) = Cost::of(&context, &store, query).await?;
                println!("{name:<18}{cost}");
                answers.push((name, answer));
            }
        }
        store.flush().await?;
    }
    println!("\nrequests at the server: {}", server.requests());
    let (first, later) = answers.split_at(QUERIES.len());
    for (name, answer) in later {
        let expected = first.iter().find(|(first, _)| first == name);
        anyhow::ensure!(expected.is_some_and(|(_, first)| first == answer), "{name} differs");
    }
    for (name, answer) in first {
        println!("\n{name}\n{answer}");
    }
    Ok(())
}
