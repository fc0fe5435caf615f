//! Clients of a server: programs that ask, that are slow, and that ask nothing.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use bifolio::{Cache, OpenOptions};
use bifolio_stats::{CLIENT_MAX, StatsServer, serve, serve_on, text};

const PAGE: usize = 4096;
const GET: &str = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

fn cache() -> Cache {
    Cache::builder().memory(16 << 20).build().unwrap()
}

fn connect(server: &StatsServer) -> UnixStream {
    UnixStream::connect(server.address()).unwrap()
}

fn ask(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn the_text_has_every_counter_and_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache();
    let path = directory.path().join("a \"quoted\" name");
    let file = cache.open(&path, &OpenOptions::new().write(true).create(true)).unwrap();
    file.write_all_at(&[7; 3 * PAGE], 0).unwrap();
    let text = text(&cache, "x\\y");
    for (name, count) in cache.stats().counts() {
        assert!(text.contains(&format!("\nbifolio_{name}_total {count}\n")), "{name}: {text}");
    }
    assert!(text.contains(&format!("\nbifolio_memory_bound_bytes {}\n", 16 << 20)));
    assert!(text.contains("bifolio_info{name=\"x\\\\y\",pid=\""), "{text}");
    let shown = path.display().to_string().replace('"', "\\\"");
    let line = format!("bifolio_file_dirty_bytes{{file=\"{shown}\"}} {}\n", 3 * PAGE);
    assert!(text.contains(&line), "{text}");
    let files = cache.files();
    assert_eq!((files.len(), files[0].len_bytes), (1, 3 * PAGE as u64));
    assert_eq!(files[0].resident_bytes, 3 * PAGE as u64);
}

#[test]
fn a_server_answers_until_it_is_dropped() {
    let cache = cache();
    let server = serve(&cache, "until").unwrap();
    // A client that goes away at once, and some that ask for something else.
    drop(connect(&server));
    for request in ["GET /secret HTTP/1.0\r\n\r\n", "PUT /metrics HTTP/1.0\r\n\r\n"] {
        assert!(ask(connect(&server), request).starts_with("HTTP/1.0 404"));
    }
    assert!(!ask(connect(&server), "what?\r\n\r\n").contains("200 OK"));
    let text = ask(connect(&server), GET);
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(text.contains("bifolio_info{name=\"until\""), "{text}");
    let other = serve(&cache, "other").unwrap();
    assert_ne!(other.address(), server.address());
    let address = server.address().to_owned();
    drop(server);
    assert!(UnixStream::connect(&address).is_err());
    assert!(!Path::new(&address).exists());
    assert!(ask(connect(&other), GET).contains("name=\"other\""));
}

#[test]
fn a_server_on_a_network_address_serves_the_same() {
    let cache = cache();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = serve_on(&cache, listener, "tcp").unwrap();
    let stream = TcpStream::connect(server.address()).unwrap();
    // The end of the request, as some programs send it.
    let mut half = stream.try_clone().unwrap();
    half.write_all(GET.as_bytes()).unwrap();
    half.shutdown(Shutdown::Write).unwrap();
    let mut text = String::new();
    half.read_to_string(&mut text).unwrap();
    assert!(text.contains("bifolio_reads_misses_total 0\n"), "{text}");
    let address = server.address().to_owned();
    drop(server);
    assert!(TcpStream::connect(address).is_err());
}

/// Clients that have sent a part of a request, or all of it, and never read.
fn slow_clients(server: &StatsServer) -> Vec<UnixStream> {
    let requests = ["", "GET /met", GET];
    let client = |index: usize| {
        let mut client = connect(server);
        client.write_all(requests[index % requests.len()].as_bytes()).unwrap();
        client
    };
    (0..60).map(client).collect()
}

#[test]
fn slow_clients_delay_no_other_and_are_dropped_in_time() {
    let cache = cache();
    let server = serve(&cache, "slow").unwrap();
    let mut slow = slow_clients(&server);
    let started = Instant::now();
    assert!(ask(connect(&server), GET).contains("200 OK"));
    // One after the other, they would take a minute.
    assert!(started.elapsed() < 10 * CLIENT_MAX, "{:?}", started.elapsed());
    let mut dropped = String::new();
    slow[0].set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(slow[0].read_to_string(&mut dropped).unwrap(), 0);
}

#[test]
fn more_clients_than_places_wait_for_one_deadline() {
    let cache = cache();
    let server = serve(&cache, "many").unwrap();
    let _slow = [slow_clients(&server), slow_clients(&server)];
    let started = Instant::now();
    assert!(ask(connect(&server), GET).contains("200 OK"));
    assert!(started.elapsed() < 10 * CLIENT_MAX, "{:?}", started.elapsed());
}

#[test]
fn a_drop_waits_for_no_client() {
    let cache = cache();
    let server = serve(&cache, "dropped").unwrap();
    let mut slow = slow_clients(&server);
    assert!(ask(connect(&server), GET).contains("200 OK"));
    drop(server);
    // Their connections have ended with the server, before their deadline.
    slow[0].set_nonblocking(true).unwrap();
    assert_eq!(slow[0].read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_silent_client_keeps_no_cache_in_memory() {
    let cache = cache();
    let server = serve(&cache, "silent").unwrap();
    let mut silent = connect(&server);
    silent.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    // Answered after the silent client was accepted.
    assert!(ask(connect(&server), GET).contains("200 OK"));
    let observed = cache.downgrade();
    drop(cache);
    assert!(observed.upgrade().is_none());
    // What it gets if it goes on in time.
    if silent.write_all(b"\r\n").is_ok() {
        let mut text = String::new();
        let _ = silent.read_to_string(&mut text);
        assert!(text.is_empty() || text.starts_with("HTTP/1.1 503"), "{text}");
    }
}
