//! One cache for many processes: an *owner* serves its [`bifolio::Cache`] to *clients*, which hit
//! its pages without a call of the owner.
//!
//! ```
//! # let directory = tempfile::tempdir()?;
//! # let (path, socket) = (directory.path().join("data"), directory.path().join("cache.sock"));
//! # std::fs::write(&path, b"0123456789")?;
//! use bifolio_share::{Options, Server, SharedCache};
//! // In one process:
//! let cache = bifolio::Cache::builder().memory(16 << 20).shared(true).build()?;
//! let server = Server::start(&cache, &socket)?;
//! // In others:
//! let shared = SharedCache::connect(&socket)?;
//! let file = shared.open(&path, &Options::new())?;
//! let mut buffer = [0; 4];
//! assert_eq!(file.read_at(&mut buffer, 2)?, 4);
//! assert_eq!(&buffer, b"2345");
//! # drop(server);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How
//!
//! The owner's frames, tables and lengths are in memory that a client maps for reading
//! (`bifolio::sharing`). A hit is what it is in the owner: two loads of a word around a copy; it
//! writes nothing that another process reads. For anything else the client asks the owner.
//!
//! ```text
//!   server.rs   owner: a socket, a thread for each client: opens, closes, the client's end
//!   worker.rs   owner: threads that answer the requests of one client, and mark what it used
//!   client.rs   SharedCache, SharedFile: hits, requests, the owner's end
//!   ring.rs     the memory of requests, which both sides write
//!   wire.rs     messages of the socket, with descriptors
//!   error.rs    errors, also those that an owner's call returned
//! ```
//!
//! # Who trusts whom
//!
//! Owner and clients belong to one user, which the owner checks (`SO_PEERCRED`). The kernel checks
//! the rights of the client: it opens a path itself and passes the descriptor. The owner does not
//! rely on a client: it copies each word of a request once and checks it, waits for a client
//! nowhere but in threads of this client, and drops what a client had when the client ends. A
//! client relies on the owner for right bytes, as for its own memory.
//!
//! # Not yet
//!
//! Children of an owner as clients; creating files; classes, codecs, gates and maps of files; reads
//! in place; statistics of a client. Pages that a client uses are marked when it has noted 64 of
//! them, or asks for something, not when reclaim looks at them. The crate is not published.

mod client;
mod error;
mod ring;
mod server;
mod wire;
mod worker;

pub use client::{APPEND_BYTES_MAX, Options, ReadRequest, SharedCache, SharedFile, SharedPin};
pub use error::{Error, ErrorKind, Result};
pub use server::Server;
