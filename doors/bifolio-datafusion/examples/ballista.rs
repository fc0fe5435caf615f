//! Ballista over an object store: a scheduler and two executors as processes, each executor with a
//! cache and a disk tier of its own, and an S3-compatible server on the loopback.
//!
//! Runs the queries twice. Then kills one executor, starts it again with its disk tier, and runs
//! them once more. Prints the time of each query, and what each executor read from where.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballista::datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use ballista::datafusion::execution::session_state::{SessionState, SessionStateBuilder};
use ballista::prelude::{SessionConfigExt, SessionContextExt};
use ballista_core::utils::default_session_builder;
use ballista_executor::executor_process::{ExecutorProcessConfig, start_executor_process};
use ballista_scheduler::cluster::BallistaCluster;
use ballista_scheduler::config::{SchedulerConfig, TaskDistributionPolicy};
use ballista_scheduler::scheduler_process::start_server;
use bifolio::Cache;
use bifolio_datafusion::queries::{QUERIES, TABLES_URL, answer, register_tables};
use bifolio_datafusion::server::{Server, connect};
use bifolio_datafusion::tables;
use bifolio_object_store::CachedStore;
use clap::{Parser, Subcommand};
use datafusion::prelude::{SessionConfig, SessionContext};
use object_store::ObjectStore;
use url::Url;

#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    role: Option<Role>,
    /// Files of the larger table.
    #[arg(long, default_value_t = 4)]
    files: u64,
    /// Rows of each of them.
    #[arg(long, default_value_t = 250_000)]
    rows: u64,
    /// Memory of the cache of each executor, MiB.
    #[arg(long, default_value_t = 16)]
    memory_mib: u64,
    /// Time after which the server answers, ms.
    #[arg(long, default_value_t = 20)]
    latency_ms: u64,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// The scheduler; started by the example.
    Scheduler { port: u16, endpoint: String },
    /// An executor; started by the example. Prints its counts for each line of its input.
    Executor {
        scheduler_port: u16,
        port: u16,
        grpc_port: u16,
        endpoint: String,
        directory: PathBuf,
        memory_mib: u64,
    },
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match &arguments.role {
        None => run(&arguments).await,
        Some(Role::Scheduler { port, endpoint }) => schedule(*port, endpoint).await,
        Some(Role::Executor { .. }) => {
            execute(arguments.role.unwrap_or_else(|| unreachable!())).await
        }
    }
}

/// Returns an environment in which the tables are in `store`.
fn environment(store: Arc<dyn ObjectStore>) -> datafusion::error::Result<Arc<RuntimeEnv>> {
    let environment = RuntimeEnvBuilder::new().build_arc()?;
    let url = Url::parse(TABLES_URL)
        .map_err(|error| datafusion::error::DataFusionError::External(Box::new(error)))?;
    environment.register_object_store(&url, store);
    Ok(environment)
}

/// Plans queries: lists the tables, and reads the ends of their files.
async fn schedule(port: u16, endpoint: &str) -> Result<()> {
    let bucket = connect(endpoint)?;
    let session = move |config: SessionConfig| -> datafusion::error::Result<SessionState> {
        let state = default_session_builder(config)?;
        let environment = environment(Arc::clone(&bucket))?;
        Ok(SessionStateBuilder::new_from_existing(state).with_runtime_env(environment).build())
    };
    let config = SchedulerConfig {
        bind_port: port,
        override_session_builder: Some(Arc::new(session)),
        task_distribution: TaskDistributionPolicy::RoundRobin,
        executor_timeout_seconds: 4,
        expire_dead_executor_interval_seconds: 1,
        ..SchedulerConfig::default()
    };
    let cluster = BallistaCluster::new_from_config(&config).await?;
    start_server(cluster, local(port), Arc::new(config)).await?;
    Ok(())
}

/// Runs parts of queries, over a cached store.
async fn execute(role: Role) -> Result<()> {
    let Role::Executor { scheduler_port, port, grpc_port, endpoint, directory, memory_mib } = role
    else {
        unreachable!("the role is that of an executor");
    };
    let cache = Cache::builder().memory(memory_mib << 20).build()?;
    let store = CachedStore::builder(connect(&endpoint)?, &cache)
        .disk(directory.join("tier"), 1 << 30)
        .head_age(Duration::from_secs(600))
        .build()?;
    let counted = store.clone();
    thread::spawn(move || {
        for _ in std::io::stdin().lines() {
            let counts = counted.metrics().named();
            let counts = counts.into_iter().filter(|(_, count)| *count > 0);
            let counts: Vec<_> = counts.map(|(name, count)| format!("{name} {count}")).collect();
            println!("{}", counts.join(", "));
        }
        // The example has ended.
        std::process::exit(0);
    });
    let config = ExecutorProcessConfig {
        port,
        grpc_port,
        scheduler_port,
        scheduler_host: "127.0.0.1".into(),
        external_host: Some("127.0.0.1".into()),
        scheduler_connect_timeout_seconds: 30,
        executor_heartbeat_interval_seconds: 1,
        vcores: 2,
        work_dir: Some(directory.join("work").to_string_lossy().into_owned()),
        override_runtime_producer: Some(Arc::new(move |_| environment(Arc::new(store.clone())))),
        ..ExecutorProcessConfig::default()
    };
    std::fs::create_dir_all(directory.join("work"))?;
    start_executor_process(Arc::new(config)).await?;
    Ok(())
}

/// A child process, killed when it is dropped.
struct Process(Child, BufReader<ChildStdout>);

impl Process {
    fn start(arguments: &[String]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let output = child.stdout.take().context("the output is a pipe")?;
        Ok(Self(child, BufReader::new(output)))
    }

    /// Asks an executor for its counts.
    fn counts(&mut self) -> Result<String> {
        writeln!(self.0.stdin.as_mut().context("the input is a pipe")?)?;
        let mut line = String::new();
        self.1.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Returns ports that were free a moment ago.
fn free_ports<const COUNT: usize>() -> Result<[u16; COUNT]> {
    let listeners = [(); COUNT].map(|()| TcpListener::bind(local(0)));
    let mut ports = [0; COUNT];
    for (port, listener) in ports.iter_mut().zip(listeners) {
        *port = listener?.local_addr()?.port();
    }
    Ok(ports)
}

fn wait_for(port: u16) -> Result<()> {
    let started = Instant::now();
    while TcpStream::connect(local(port)).is_err() {
        ensure!(started.elapsed() < Duration::from_secs(60), "nothing listens on port {port}");
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn start_executor(
    number: usize,
    directory: &Path,
    scheduler_port: u16,
    endpoint: &str,
    memory_mib: u64,
) -> Result<Process> {
    let [port, grpc_port] = free_ports()?;
    let directory = directory.join(format!("executor-{number}"));
    let arguments = [scheduler_port, port, grpc_port].map(|port| port.to_string());
    let rest = [endpoint.to_owned(), directory.to_string_lossy().into(), memory_mib.to_string()];
    let arguments = [&["executor".to_owned()][..], &arguments, &rest].concat();
    let process = Process::start(&arguments)?;
    wait_for(port)?;
    Ok(process)
}

async fn run(arguments: &Arguments) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let latency = Duration::from_millis(arguments.latency_ms);
    let server = Server::start(&directory.path().join("server"), latency).await?;
    let endpoint = server.endpoint();
    let bucket = connect(&endpoint)?;
    let bytes = tables::create(&bucket, arguments.files, arguments.rows).await?;
    println!("{} MiB of Parquet on {endpoint}", bytes >> 20);

    let [port] = free_ports()?;
    let arguments_of_scheduler = ["scheduler".to_owned(), port.to_string(), endpoint.clone()];
    let _scheduler = Process::start(&arguments_of_scheduler)?;
    wait_for(port)?;
    let start =
        |number| start_executor(number, directory.path(), port, &endpoint, arguments.memory_mib);
    let mut executors = [start(1)?, start(2)?];

    let state = SessionStateBuilder::new()
        .with_config(SessionConfig::new_with_ballista().with_target_partitions(4))
        .with_runtime_env(environment(bucket)?)
        .with_default_features()
        .build();
    let scheduler = format!("df://127.0.0.1:{port}");
    let context = SessionContext::remote_with_state(&scheduler, state).await?;
    register_tables(&context).await?;
    let mut answers = Vec::new();
    for title in ["first run", "second run", "after executor 1 was killed"] {
        if title.starts_with("after") {
            let [first, _] = &mut executors;
            first.0.kill()?;
            first.0.wait()?;
            *first = start(1)?;
            // The scheduler learns from the missing heartbeats that the old one is gone.
            tokio::time::sleep(Duration::from_secs(6)).await;
        }
        println!("\n{title}");
        for (name, query) in QUERIES {
            let started = Instant::now();
            let text = answer(&context, query).await.with_context(|| format!("{title}: {name}"))?;
            println!("{name:<18} {:>6} ms", started.elapsed().as_millis());
            answers.push((name, text));
        }
        for (number, executor) in (1..).zip(&mut executors) {
            println!("executor {number}: {}", executor.counts()?);
        }
        println!("requests at the server: {}", server.requests());
    }
    let (first, later) = answers.split_at(QUERIES.len());
    for (name, text) in later {
        let expected = first.iter().find(|(first, _)| first == name);
        ensure!(expected.is_some_and(|(_, first)| first == text), "{name} differs");
    }
    Ok(())
}
