//! Real text of this machine: documentation and source code, cut into passages.
//!
//! Files are visited in the order of their paths, so a corpus is the same on each run. Those that
//! are not UTF-8 are left out; of HTML the tags are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A passage ends with the first line after so many bytes.
const PASSAGE_BYTES: usize = 1500;
/// Larger files are tables or generated.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A part of a file, which becomes a document of the index.
pub(super) struct Passage {
    pub(super) path: String,
    /// Number of its first line, from 1 on.
    pub(super) line: u64,
    pub(super) text: String,
}

/// The folders with text that machines with Rust have.
pub(super) fn default_folders() -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from("/usr/share/doc")];
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let cargo = std::env::var_os("CARGO_HOME").map_or_else(|| home.join(".cargo"), PathBuf::from);
    folders.push(cargo.join("registry/src"));
    if let Ok(output) = Command::new("rustc").args(["--print", "sysroot"]).output() {
        let sysroot = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        folders.push(PathBuf::from(sysroot).join("share/doc"));
    }
    folders
}

/// All files below `folders`, shuffled by a hash of their path so that any part is like the whole.
pub(super) fn files(folders: &[PathBuf]) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut waiting = folders.to_vec();
    while let Some(folder) = waiting.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => waiting.push(entry.path()),
                Ok(kind) if kind.is_file() => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files.sort_by_cached_key(|path| (hash(path), path.clone()));
    files
}

/// FNV-1a.
fn hash(path: &Path) -> u64 {
    let bytes = path.as_os_str().as_encoded_bytes();
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The passages of a file; none if it is not text.
pub(super) fn passages(path: &Path) -> Vec<Passage> {
    let is_small = fs::metadata(path).is_ok_and(|found| found.len() <= FILE_BYTES_MAX);
    let text = if is_small { fs::read(path).ok() } else { None };
    let Some(text) = text.and_then(|bytes| String::from_utf8(bytes).ok()) else {
        return Vec::new();
    };
    if text.contains('\0') {
        return Vec::new();
    }
    let is_html = path.extension().is_some_and(|extension| extension == "html");
    let text = if is_html { without_tags(&text) } else { text };
    cut(&path.to_string_lossy(), &text)
}

fn cut(path: &str, text: &str) -> Vec<Passage> {
    let mut passages = Vec::new();
    let (mut passage, mut first_line) = (String::new(), 1);
    for (number, line) in (1..).zip(text.lines()) {
        if passage.len() >= PASSAGE_BYTES {
            let text = std::mem::take(&mut passage);
            passages.push(Passage { path: path.to_owned(), line: first_line, text });
            first_line = number;
        }
        passage.push_str(line);
        passage.push('\n');
    }
    if !passage.trim().is_empty() {
        passages.push(Passage { path: path.to_owned(), line: first_line, text: passage });
    }
    passages
}

fn without_tags(html: &str) -> String {
    let mut text = String::with_capacity(html.len() / 2);
    let mut is_in_tag = false;
    for character in html.chars() {
        match character {
            '<' => is_in_tag = true,
            '>' if is_in_tag => {
                is_in_tag = false;
                text.push(' ');
            }
            _ if is_in_tag && character != '\n' => {}
            _ => text.push(character),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passages_have_every_line_once_and_know_their_first() {
        let text: String = (1..=200).map(|line| format!("line {line} of the text\n")).collect();
        let passages = cut("file", &text);
        assert!(passages.len() > 1);
        assert_eq!(passages.iter().map(|passage| passage.text.as_str()).collect::<String>(), text);
        for passage in &passages {
            assert!(passage.text.starts_with(&format!("line {} ", passage.line)));
        }
    }

    #[test]
    fn tags_are_left_out_and_lines_stay() {
        assert_eq!(without_tags("<p class=\n\"x\">a<br>b</p>\n"), "\n a b \n");
    }
}
