//! An index whose commits are made of their numbers, so it can be checked after a kill.
//!
//! Commit `n` adds `ADDED` documents and deletes one that an earlier commit added. The number of
//! the last commit is the payload of the index.

use std::collections::HashSet;
use std::path::Path;

use bifolio::Cache;
use bifolio_tantivy::BifolioDirectory;
use fastrand::Rng;
use tantivy::collector::TopDocs;
use tantivy::directory::Directory;
use tantivy::query::TermQuery;
use tantivy::schema::{
    Field, INDEXED, IndexRecordOption, STORED, Schema, SchemaBuilder, TEXT, Value,
};
use tantivy::{Index, IndexWriter, ReloadPolicy, Searcher, TantivyDocument, Term, doc};

const ADDED: u64 = 20;
const WRITER_BYTES: usize = 15_000_000;

pub fn cache(bytes: u64) -> Cache {
    Cache::builder().memory(bytes).build().unwrap()
}

pub struct Fields {
    pub id: Field,
    pub text: Field,
}

pub fn schema() -> (Schema, Fields) {
    let mut builder = SchemaBuilder::default();
    let id = builder.add_u64_field("id", INDEXED | STORED);
    let text = builder.add_text_field("text", TEXT | STORED);
    (builder.build(), Fields { id, text })
}

pub fn open(path: &Path, cache: &Cache) -> Index {
    open_in(BifolioDirectory::open(path, cache).unwrap())
}

pub fn open_in(directory: impl Directory) -> Index {
    Index::open_or_create(Box::new(directory) as Box<dyn Directory>, schema().0).unwrap()
}

pub fn writer(index: &Index) -> IndexWriter {
    index.writer_with_num_threads(1, WRITER_BYTES).unwrap()
}

/// The text of a document: a word that only it has, and others.
pub fn text(id: u64) -> String {
    let mut random = Rng::with_seed(id);
    let mut text = format!("only{id}");
    for _ in 0..random.usize(1..300) {
        text.push_str(&format!(" word{}", random.u32(..1000)));
    }
    text
}

/// The document that a commit deletes.
fn deleted_by(number: u64) -> u64 {
    Rng::with_seed(number).u64(..number * ADDED)
}

/// Makes commit `number`, the first of which is 1.
pub fn commit(writer: &mut IndexWriter, number: u64) -> tantivy::Result<()> {
    let (_, fields) = schema();
    for id in number * ADDED..(number + 1) * ADDED {
        writer.add_document(doc!(fields.id => id, fields.text => text(id)))?;
    }
    writer.delete_term(Term::from_field_u64(fields.id, deleted_by(number)));
    let mut commit = writer.prepare_commit()?;
    commit.set_payload(&number.to_string());
    commit.commit()?;
    Ok(())
}

/// The number of the last commit; 0 without any.
pub fn last_commit(index: &Index) -> u64 {
    index.load_metas().unwrap().payload.map_or(0, |payload| payload.parse().unwrap())
}

pub fn searcher(index: &Index) -> Searcher {
    index.reader_builder().reload_policy(ReloadPolicy::Manual).try_into().unwrap().searcher()
}

/// The stored text of the documents that have the term.
pub fn find(searcher: &Searcher, term: Term) -> Vec<String> {
    let query = TermQuery::new(term, IndexRecordOption::Basic);
    let found = searcher.search(&query, &TopDocs::with_limit(10).order_by_score()).unwrap();
    let text_of = |(_, address)| {
        let document: TantivyDocument = searcher.doc(address).unwrap();
        document.get_first(schema().1.text).unwrap().as_str().unwrap().to_owned()
    };
    found.into_iter().map(text_of).collect()
}

/// How many documents an index has after commit `last`: more than after each earlier one.
pub fn documents(last: u64) -> u64 {
    let added = ADDED..(last + 1) * ADDED;
    let deleted: HashSet<u64> = (1..=last).map(deleted_by).collect();
    added.filter(|id| !deleted.contains(id)).count() as u64
}

/// Every document of the first `last` commits is found, by its number and by its own word, and
/// nothing else is.
pub fn assert_holds(searcher: &Searcher, last: u64) {
    let fields = schema().1;
    let deleted: HashSet<u64> = (1..=last).map(deleted_by).collect();
    for id in ADDED..(last + 1) * ADDED {
        let expected = if deleted.contains(&id) { vec![] } else { vec![text(id)] };
        assert_eq!(find(searcher, Term::from_field_u64(fields.id, id)), expected, "{id}");
        let word = Term::from_field_text(fields.text, &format!("only{id}"));
        assert_eq!(find(searcher, word), expected, "{id}");
    }
    assert_eq!(searcher.num_docs(), documents(last));
}
