//! Names on the Hub: `OWNER/NAME` or `OWNER/NAME@REVISION`, and short names for some.

use std::fmt;

/// The kind of thing that a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A model.
    Model,
    /// A data set.
    Data,
}

/// Short names, with the names that they stand for.
const ALIASES: [(Kind, &str, &str); 2] = [
    (Kind::Model, "smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    (Kind::Data, "yelp", "Yelp/yelp_review_full"),
];

/// The revision that a name without one means.
pub(super) const MAIN: &str = "main";
/// The most characters of a name.
const MAX_CHARS: usize = 96;

impl Kind {
    /// The kind in words, and the word of `paceline fetch`.
    pub(super) fn names(self) -> [&'static str; 2] {
        match self {
            Self::Model => ["model", "model"],
            Self::Data => ["data set", "data"],
        }
    }

    /// The word of the cache's folders and of the Hub's interface.
    pub(super) fn plural(self) -> &'static str {
        if self == Self::Model { "models" } else { "datasets" }
    }
}

/// A model or a data set of the Hub, at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub kind: Kind,
    /// `OWNER/NAME`.
    pub path: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

impl Name {
    /// The name that a text is, if it can be one.
    pub fn parse(kind: Kind, text: &str) -> Option<Self> {
        let (path, revision) = text.split_once('@').unwrap_or((text, MAIN));
        let alias = ALIASES.iter().find(|(of, short, _)| (*of, *short) == (kind, path));
        let path = alias.map_or(path, |(_, _, long)| *long);
        let (owner, name) = path.split_once('/')?;
        let is_name = is_word(owner) && is_word(name) && !name.ends_with(".git");
        let (path, revision) = (path.to_owned(), revision.to_owned());
        (is_name && is_revision(&revision)).then_some(Self { kind, path, revision })
    }

    /// The name at another revision, unless that cannot be a revision.
    pub fn at(self, revision: &str) -> Option<Self> {
        is_revision(revision).then(|| Self { revision: revision.to_owned(), ..self })
    }

    /// The short name, if there is one.
    pub fn alias(&self) -> Option<&'static str> {
        let alias = ALIASES.iter().find(|(kind, _, long)| *kind == self.kind && *long == self.path);
        alias.map(|(_, short, _)| *short)
    }
}

/// As it is typed, with the revision if it is not the usual one.
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)?;
        if self.revision == MAIN { Ok(()) } else { write!(f, "@{}", self.revision) }
    }
}

/// Whether a text is a commit in full.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a text can be the name of an owner or of a model, by the Hub's rules. It also names a folder.
fn is_word(text: &str) -> bool {
    let is_inner = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
    text.len() <= MAX_CHARS
        && text.chars().all(is_inner)
        && is_end(text.chars().next())
        && is_end(text.chars().last())
        && !["--", ".."].iter().any(|pair| text.contains(pair))
}

/// Whether a text can be a branch, a tag or a commit. It becomes a path below `refs`.
fn is_revision(text: &str) -> bool {
    let is_part = |part: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || "_-.+".contains(c);
        !part.is_empty() && !part.starts_with(['.', '-']) && part.chars().all(known)
    };
    text.len() <= 2 * MAX_CHARS && !text.contains("..") && text.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_an_owner_and_may_have_a_revision() {
        let name = Name::parse(Kind::Model, "HuggingFaceTB/SmolLM2-360M").unwrap();
        assert_eq!(name.path, "HuggingFaceTB/SmolLM2-360M");
        assert_eq!((name.revision.as_str(), name.to_string()), ("main", name.path));
        let name = Name::parse(Kind::Data, "a/b_c.d@refs/pr/4").unwrap();
        assert_eq!(
            (name.revision.as_str(), name.to_string().as_str()),
            ("refs/pr/4", "a/b_c.d@refs/pr/4")
        );
        assert_eq!(name.at("v1.0").unwrap().to_string(), "a/b_c.d@v1.0");
        for no_name in [
            "", "a", "/", "a/", "/b", "./b", "../b", "a/b/c", "a--b/c", "a/b..c", "-a/b", "a/b-",
            "a/b.git", "a b/c", "a/b@", "a/b@../c", "a/b@c//d", "a/b@-c", "a/\u{e9}", "yelp/",
        ] {
            assert_eq!(Name::parse(Kind::Model, no_name), None, "{no_name}");
        }
    }

    #[test]
    fn short_names_are_of_one_kind() {
        let model = Name::parse(Kind::Model, "smollm2-360m@v1").unwrap();
        assert_eq!(model.to_string(), "HuggingFaceTB/SmolLM2-360M-Instruct@v1");
        assert_eq!(model.alias(), Some("smollm2-360m"));
        assert_eq!(Name::parse(Kind::Data, "yelp").unwrap().path, "Yelp/yelp_review_full");
        assert_eq!(Name::parse(Kind::Model, "yelp"), None);
        for (kind, short, long) in ALIASES {
            assert_eq!(Name::parse(kind, short), Name::parse(kind, long));
        }
    }
}
