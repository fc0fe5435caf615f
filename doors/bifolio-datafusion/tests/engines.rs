//! DataFusion and Ballista over the cached store, on an S3-compatible server: answers, requests,
//! credentials; and the two examples.
#![allow(missing_docs)]

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bifolio::Cache;
use bifolio_datafusion::queries::{QUERIES, TABLES_URL, answer, register_tables};
use bifolio_datafusion::server::{Server, connect, connect_with_wrong_credentials};
use bifolio_datafusion::tables;
use bifolio_object_store::CachedStore;
use datafusion::prelude::SessionContext;
use object_store::ObjectStore;
use url::Url;

async fn context(store: Arc<dyn ObjectStore>) -> SessionContext {
    let context = SessionContext::new();
    context.register_object_store(&Url::parse(TABLES_URL).unwrap(), store);
    register_tables(&context).await.unwrap();
    context
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_those_of_the_store_alone() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&directory.path().join("server"), Duration::ZERO).await.unwrap();
    let bucket = connect(&server.endpoint()).unwrap();
    tables::create(&bucket, 2, 100_000).await.unwrap();
    let alone = context(Arc::clone(&bucket)).await;
    let mut expected = Vec::new();
    for (_, query) in QUERIES {
        expected.push(answer(&alone, query).await.unwrap());
    }
    let alone_requests = server.requests();
    for run in 0..2 {
        let cache = Cache::builder().memory(4 << 20).build().unwrap();
        let store = CachedStore::builder(Arc::clone(&bucket), &cache)
            .disk(directory.path().join("tier"), 256 << 20)
            .head_age(Duration::from_secs(600))
            .build()
            .unwrap();
        let cached = context(Arc::new(store.clone())).await;
        let before = server.requests();
        for _ in 0..2 {
            for ((name, query), expected) in QUERIES.iter().zip(&expected) {
                assert_eq!(&answer(&cached, query).await.unwrap(), expected, "{name}");
            }
        }
        store.flush().await.unwrap();
        let metrics = store.metrics();
        println!("{alone_requests} requests alone, {} cached: {metrics:?}", server.requests());
        assert_eq!((metrics.corrupt, metrics.changed, metrics.not_inserted), (0, 0, 0));
        if run == 1 {
            // Everything is on disk.
            assert_eq!(metrics.get_requests, 0, "{metrics:?}");
            assert!(server.requests() - before <= 4, "{metrics:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_credentials_are_a_clear_error() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path(), Duration::ZERO).await.unwrap();
    let bucket = connect(&server.endpoint()).unwrap();
    tables::create(&bucket, 1, 1000).await.unwrap();
    let refused = connect_with_wrong_credentials(&server.endpoint()).unwrap();
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let store = CachedStore::builder(refused, &cache).build().unwrap();
    let location = "lineitem/part-0.parquet".into();
    let error = store.get_ranges(&location, &[0..4, 8..9]).await.unwrap_err();
    let is_refusal = matches!(
        error,
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. }
    );
    assert!(is_refusal, "{error}");
}

/// Runs an example, which cargo has built beside the tests, on small tables.
fn run_example(name: &str) {
    let tests: PathBuf = std::env::current_exe().unwrap();
    let example = tests.parent().unwrap().parent().unwrap().join("examples").join(name);
    let output = Command::new(example)
        .args(["--files", "2", "--rows", "20000", "--latency-ms", "1"])
        .output()
        .unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), output.stderr);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&errors));
}

#[test]
fn the_example_of_one_process_runs() {
    run_example("datafusion");
}

#[test]
fn the_example_of_three_processes_survives_a_killed_worker() {
    run_example("ballista");
}
