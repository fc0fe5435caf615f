//! The thread that answers requests: hyper on a runtime of one thread.
//!
//! Each client is a task with one deadline, which covers its request and its answer. A client that
//! sends nothing, or reads nothing, holds a place until then and delays no other; the number of
//! places is [`CLIENTS_MAX`]. The cache is referenced while a snapshot is taken, not while a client
//! is waited for.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bifolio::{Cache, WeakCache};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};

use crate::CLIENT_MAX;
use crate::descriptors::{self, lift};
use crate::sockets::Socket;
use crate::text::text;

/// Number of clients that are served at a time; another one waits for its place.
const CLIENTS_MAX: usize = 64;

/// Pause after a client could not be accepted, such as when the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Format of the answers.
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A socket to which clients connect.
#[derive(Debug)]
pub(crate) enum Listener {
    Local(UnixListener),
    Network(TcpListener),
}

/// Serves the statistics of a cache until it is dropped. See [`serve`](crate::serve).
///
/// In a forked child there is no server: a drop there does nothing.
#[derive(Debug)]
pub struct StatsServer {
    address: String,
    /// Removed first, so that no client finds a socket without a server.
    socket: Option<Socket>,
    /// Ends the thread when dropped.
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl StatsServer {
    pub(crate) fn start(
        cache: &Cache,
        name: &str,
        listener: Listener,
        address: String,
        socket: Option<Socket>,
    ) -> io::Result<Self> {
        let _occupied = descriptors::occupy()?;
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        let served = Arc::new(Served { cache: cache.downgrade(), name: name.to_owned() });
        start_accepting(&runtime, listener, served)?;
        let (end, ended) = oneshot::channel();
        // Tasks end with the runtime, wherever they are.
        let run = move || drop(runtime.block_on(ended));
        let signals = block_signals()?;
        let thread = thread::Builder::new().name("bifolio-stats".into()).spawn(run);
        // Fails for no set of signals.
        let _ = signals.thread_set_mask();
        let (end, thread) = (Some(end), Some(thread?));
        Ok(Self { address, socket, end, thread, process: std::process::id() })
    }

    /// Returns the path of the socket, or the network address.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for StatsServer {
    fn drop(&mut self) {
        let (socket, end, thread) = (self.socket.take(), self.end.take(), self.thread.take());
        if std::process::id() != self.process {
            // The thread, its runtime and the socket are the parent's.
            std::mem::forget((socket, end, thread));
            return;
        }
        drop((socket, end));
        // A panic of the thread has been reported already.
        let _ = thread.map(JoinHandle::join);
    }
}

/// Blocks every signal that another thread can take, which a new thread inherits. Returns the
/// previous mask.
fn block_signals() -> io::Result<SigSet> {
    let mut signals = SigSet::all();
    for fault in [Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL, Signal::SIGSEGV, Signal::SIGTRAP]
    {
        signals.remove(fault);
    }
    Ok(signals.thread_swap_mask(SigmaskHow::SIG_SETMASK)?)
}

/// State that the clients of a server share.
#[derive(Debug)]
struct Served {
    cache: WeakCache,
    name: String,
}

impl Served {
    /// Answers a request, which was read.
    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let is_known = matches!(request.uri().path(), "/" | "/metrics");
        let (status, body) = if request.method() != Method::GET || !is_known {
            (StatusCode::NOT_FOUND, "only GET /metrics is here\n".to_owned())
        } else if let Some(cache) = self.cache.upgrade() {
            (StatusCode::OK, text(&cache, &self.name))
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "the cache has ended\n".to_owned())
        };
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, PROMETHEUS_TEXT.parse().expect("is valid"));
        response
    }
}

fn start_accepting(runtime: &Runtime, listener: Listener, served: Arc<Served>) -> io::Result<()> {
    let _entered = runtime.enter();
    match listener {
        Listener::Local(listener) => {
            listener.set_nonblocking(true)?;
            let listener = Arc::new(tokio::net::UnixListener::from_std(listener)?);
            let next = move || {
                let listener = Arc::clone(&listener);
                async move {
                    let client = listener.accept().await?.0.into_std()?;
                    UnixStream::from_std(lift(client.into())?.into())
                }
            };
            runtime.spawn(accept(next, served));
        }
        Listener::Network(listener) => {
            listener.set_nonblocking(true)?;
            let listener = Arc::new(tokio::net::TcpListener::from_std(listener)?);
            let next = move || {
                let listener = Arc::clone(&listener);
                async move {
                    let client = listener.accept().await?.0.into_std()?;
                    TcpStream::from_std(lift(client.into())?.into())
                }
            };
            runtime.spawn(accept(next, served));
        }
    }
    Ok(())
}

/// Accepts clients from `next` for ever, each as a task.
async fn accept<C, F>(next: impl Fn() -> F, served: Arc<Served>)
where
    C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = io::Result<C>>,
{
    let places = Arc::new(Semaphore::new(CLIENTS_MAX));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        match next().await {
            Ok(client) => {
                let served = Arc::clone(&served);
                tokio::spawn(async move {
                    // A client that is late, goes away, or sends something else is dropped.
                    let _ = timeout(CLIENT_MAX, serve_client(client, served)).await;
                    drop(place);
                });
            }
            Err(error) => {
                log::warn!("statistics of {}: cannot accept a client: {error}", served.name);
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Answers one request.
async fn serve_client<C>(client: C, served: Arc<Served>) -> hyper::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let answer = |request: Request<Incoming>| {
        let response = served.answer(&request);
        async move { Ok::<_, Infallible>(response) }
    };
    let mut connection = http1::Builder::new();
    connection.keep_alive(false).half_close(true).max_buf_size(16 << 10);
    connection.serve_connection(TokioIo::new(client), service_fn(answer)).await
}
