//! Statistics of a cache for other programs: `bifolio top`, and Prometheus.
//!
//! [`serve`] answers on a socket that only this user can open and that `bifolio top` finds by the
//! number of the process or by a name; [`serve_on`] answers on a network address. Both return a
//! [`StatsServer`], which serves until it is dropped. [`text()`] returns what they serve.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let cache = bifolio::Cache::builder().memory(16 << 20).build()?;
//! let server = bifolio_stats::serve(&cache, "orders")?;
//! println!("{}", server.address()); // then: bifolio top orders
//! # Ok(())
//! # }
//! ```
//!
//! A server is one thread that sleeps until a program connects; it takes a snapshot for each
//! request and costs nothing otherwise. It answers 64 clients at a time, and each has
//! [`CLIENT_MAX`] from its connection to its last byte. It does not keep the cache open: when the
//! last [`Cache`] is dropped, requests are answered with status 503.

mod descriptors;
mod server;
mod sockets;
mod text;

use std::io;
use std::net::TcpListener;
use std::time::Duration;

use bifolio::Cache;

use crate::server::Listener;
pub use crate::server::StatsServer;
pub use crate::sockets::directory;
pub use crate::text::text;

/// Time that a client has, from its connection to the last byte of its answer.
pub const CLIENT_MAX: Duration = Duration::from_secs(2);

/// Serves the [`text()`] of `cache` to programs of this user and of root: `bifolio top` shows it by
/// the number of this process, or by `name`. It ends when the result is dropped.
///
/// The socket is in [`directory`], which is created if it does not exist. Sockets in it that no
/// process listens to any more are removed.
///
/// # Errors
/// The directory cannot be created, belongs to another user or can be changed by one
/// ([`PermissionDenied`](io::ErrorKind::PermissionDenied)); there is no socket or no thread.
pub fn serve(cache: &Cache, name: &str) -> io::Result<StatsServer> {
    let _occupied = descriptors::occupy()?;
    let (listener, socket) = sockets::bind(&directory())?;
    let address = socket.path().display().to_string();
    StatsServer::start(cache, name, Listener::Local(listener), address, Some(socket))
}

/// Serves the [`text()`] of `cache` over HTTP, at `/metrics`, to every program that can connect to
/// `listener`. There is no encryption and no password: bind it to a loopback address. It ends when
/// the result is dropped.
///
/// # Errors
/// The listener is unusable; there is no thread.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let cache = bifolio::Cache::builder().memory(16 << 20).build()?;
/// let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
/// let server = bifolio_stats::serve_on(&cache, listener, "orders")?;
/// println!("http://{}/metrics", server.address());
/// # Ok(())
/// # }
/// ```
pub fn serve_on(cache: &Cache, listener: TcpListener, name: &str) -> io::Result<StatsServer> {
    let address = listener.local_addr()?.to_string();
    StatsServer::start(cache, name, Listener::Network(listener), address, None)
}
