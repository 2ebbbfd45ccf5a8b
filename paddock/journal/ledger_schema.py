"""Tables of the ledger, and the statements of a rewind. Names are those of format 1."""

LEDGER_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    ordinal INTEGER PRIMARY KEY,
    task TEXT NOT NULL,
    number INTEGER NOT NULL,
    size INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'in flight'
        CHECK (status IN ('in flight', 'finished', 'trained', 'filtered', 'failed')),
    reason TEXT NOT NULL DEFAULT '',
    issued INTEGER NOT NULL,
    ended INTEGER,
    trained INTEGER,
    UNIQUE (task, number),
    CHECK ((status = 'trained') = (trained IS NOT NULL)),
    CHECK ((status IN ('filtered', 'failed')) = (reason <> ''))
);
CREATE INDEX IF NOT EXISTS groups_by_status ON groups (status, trained);
CREATE INDEX IF NOT EXISTS groups_by_end ON groups (ended);
CREATE TABLE IF NOT EXISTS attempts (
    ordinal INTEGER NOT NULL REFERENCES groups,
    member INTEGER NOT NULL,
    reward REAL,
    kind TEXT NOT NULL DEFAULT '',
    place TEXT NOT NULL DEFAULT '',
    what TEXT NOT NULL DEFAULT '',
    oldest INTEGER,
    newest INTEGER,
    tokens INTEGER NOT NULL,
    packed BLOB,
    PRIMARY KEY (ordinal, member)
);
CREATE TABLE IF NOT EXISTS updates (
    first INTEGER PRIMARY KEY, until INTEGER NOT NULL, checkpoint TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS shares (
    id INTEGER PRIMARY KEY,
    since INTEGER NOT NULL,
    written INTEGER NOT NULL,
    weights TEXT NOT NULL,
    why TEXT NOT NULL,
    asked INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS skipped (
    task TEXT NOT NULL,
    number INTEGER NOT NULL,
    issued INTEGER NOT NULL,
    PRIMARY KEY (task, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rollout_seconds (
    ordinal INTEGER NOT NULL,
    member INTEGER NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (ordinal, member)
) WITHOUT ROWID;
"""

# Everything since an update: groups issued, their rollouts, weights that nobody asked for.
UNDO = (
    "DELETE FROM attempts WHERE ordinal IN (SELECT ordinal FROM groups WHERE issued >= :updates)",
    "DELETE FROM groups WHERE issued >= :updates",
    "DELETE FROM skipped WHERE issued >= :updates",
    "DELETE FROM shares WHERE written >= :updates AND NOT asked",
)
# Groups trained since an update become finished; tokens of lost weights are dropped.
UNTRAIN = (
    "UPDATE groups SET status = 'finished', reason = '' WHERE reason = :unused",
    "UPDATE groups SET status = 'finished', trained = NULL WHERE trained >= :updates",
    "DELETE FROM updates WHERE first >= :updates",
    "DELETE FROM attempts WHERE newest > :updates AND ordinal IN"
    " (SELECT ordinal FROM groups WHERE status IN ('in flight', 'finished'))",
    "UPDATE groups SET status = 'in flight', ended = NULL WHERE status = 'finished' AND size >"
    " (SELECT COUNT(*) FROM attempts WHERE attempts.ordinal = groups.ordinal)",
)
