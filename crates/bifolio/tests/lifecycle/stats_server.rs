//! Statistics served to other programs.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use bifolio::{Cache, StatsServer};

use crate::support::{PAGE, writable};

fn ask(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

const GET: &str = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

fn connect(server: &StatsServer) -> UnixStream {
    UnixStream::connect(server.address()).unwrap()
}

#[test]
fn the_text_has_every_counter_and_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let path = directory.path().join("a \"quoted\" name");
    let file = cache.open(&path, &writable().create(true)).unwrap();
    file.write_all_at(&[7; 3 * PAGE as usize], 0).unwrap();
    let text = cache.stats_text("x\\y");
    for (name, count) in cache.stats().counts() {
        assert!(text.contains(&format!("\nbifolio_{name}_total {count}\n")), "{name}: {text}");
    }
    assert!(text.contains(&format!("\nbifolio_bound_bytes {}\n", 16 << 20)));
    assert!(text.contains("bifolio_info{name=\"x\\\\y\",pid=\""), "{text}");
    let shown = path.display().to_string().replace('"', "\\\"");
    let line = format!("bifolio_file_dirty_bytes{{file=\"{shown}\"}} {}\n", 3 * PAGE);
    assert!(text.contains(&line), "{text}");
    let files = cache.files();
    assert_eq!((files.len(), files[0].len_bytes), (1, 3 * PAGE));
    assert_eq!(files[0].resident_bytes, 3 * PAGE);
}

#[test]
fn a_server_answers_until_it_is_dropped() {
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let server = cache.serve_stats("until").unwrap();
    // A client that goes away at once, and one that asks for something else.
    drop(connect(&server));
    assert!(ask(connect(&server), "GET /secret HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 404"));
    let text = ask(connect(&server), GET);
    assert!(text.starts_with("HTTP/1.0 200 OK\r\n"), "{text}");
    assert!(text.contains("bifolio_info{name=\"until\""), "{text}");
    let other = cache.serve_stats("other").unwrap();
    assert_ne!(other.address(), server.address());
    let address = server.address().to_owned();
    drop(server);
    assert!(UnixStream::connect(&address).is_err());
    assert!(!std::path::Path::new(&address).exists());
    assert!(ask(connect(&other), GET).contains("name=\"other\""));
}

#[test]
fn a_server_on_a_network_address_serves_the_same() {
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = cache.serve_stats_on(listener, "tcp").unwrap();
    let text = ask(TcpStream::connect(server.address()).unwrap(), GET);
    assert!(text.contains("bifolio_misses_total 0\n"), "{text}");
    let address = server.address().to_owned();
    drop(server);
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn a_server_does_not_keep_a_cache_in_memory() {
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let server = cache.serve_stats("short").unwrap();
    cache.close().unwrap();
    drop(cache);
    let mut stream = connect(&server);
    // The thread may have closed the connection already.
    let _ = stream.write_all(GET.as_bytes());
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    assert_eq!(text, "", "a cache that is gone has no statistics");
}
