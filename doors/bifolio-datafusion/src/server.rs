//! An S3-compatible server on the loopback, over a directory.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use object_store::ObjectStore;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// The bucket of the server.
pub const BUCKET: &str = "tables";
const ACCESS_KEY: &str = "reader";
const SECRET_KEY: &str = "secret of the loopback";

/// A server, which ends when it is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    requests: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Server {
    /// Starts a server over `directory`, which answers each request after `latency`.
    pub async fn start(directory: &Path, latency: Duration) -> Result<Self> {
        std::fs::create_dir_all(directory.join(BUCKET))?;
        let files = FileSystem::new(directory).map_err(|error| anyhow::anyhow!("{error:?}"))?;
        let mut builder = S3ServiceBuilder::new(files);
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let service = builder.build();
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let requests = Arc::<AtomicU64>::default();
        let counter = Arc::clone(&requests);
        let task = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (service, counter) = (service.clone(), Arc::clone(&counter));
                let answer = hyper::service::service_fn(move |request| {
                    counter.fetch_add(1, Ordering::Relaxed);
                    let service = service.clone();
                    async move {
                        tokio::time::sleep(latency).await;
                        hyper::service::Service::call(&service, request).await
                    }
                });
                tokio::spawn(async move {
                    let builder = Builder::new(TokioExecutor::new());
                    // An error ends the connection; its client sees that.
                    let _ = builder.serve_connection(TokioIo::new(socket), answer).await;
                });
            }
        });
        Ok(Self { address, requests, task })
    }

    /// Returns the address, for [`connect`].
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns how many requests have arrived.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns a client of the bucket of a server.
pub fn connect(endpoint: &str) -> Result<Arc<dyn ObjectStore>> {
    Ok(Arc::new(client(endpoint, SECRET_KEY)?))
}

/// Returns a client with credentials that the server does not accept.
pub fn connect_with_wrong_credentials(endpoint: &str) -> Result<Arc<dyn ObjectStore>> {
    Ok(Arc::new(client(endpoint, "another secret")?))
}

fn client(endpoint: &str, secret: &str) -> Result<AmazonS3> {
    let builder = AmazonS3Builder::new()
        .with_endpoint(endpoint)
        .with_allow_http(true)
        .with_region("us-east-1")
        .with_bucket_name(BUCKET)
        .with_access_key_id(ACCESS_KEY)
        .with_secret_access_key(secret);
    Ok(builder.build()?)
}
