#include "shadow.hpp"

#include <algorithm>

namespace host_runtime {

namespace {

// An allocation that has fewer pieces is not searched for those that need not be kept.
constexpr size_t kFewPieces = 64;

void add_if_unordered(const AccessRef &before, const Clock &clock, std::vector<AccessRef> &unordered) {
    if (!before || before->known_to(clock)) return;
    if (std::find(unordered.begin(), unordered.end(), before) == unordered.end()) unordered.push_back(before);
}

void drop_known(std::vector<AccessRef> &reads, const Clock &clock) {
    reads.erase(std::remove_if(reads.begin(), reads.end(), [&](const AccessRef &read) { return read->known_to(clock); }),
                reads.end());
}

}  // namespace

void Shadow::note(const AccessRef &access, const Clock &clock, const Clock &common, std::vector<AccessRef> &unordered) {
    const auto first = reinterpret_cast<uintptr_t>(access->start);
    const bool dense = access->pitch == access->width;
    const size_t rows = dense ? 1 : access->rows, width = dense ? access->width * access->rows : access->width;
    for (size_t row = 0; row < rows; ++row) {
        const uintptr_t start = first + row * access->pitch;
        note_row(start, start + width, access, clock, common, unordered);
    }
    if (pieces_.size() > 2 * kept_ + kFewPieces) forget(common);
}

void Shadow::note_row(uintptr_t start, uintptr_t end, const AccessRef &access, const Clock &clock, const Clock &common,
                      std::vector<AccessRef> &unordered) {
    split(start);
    split(end);
    auto piece = pieces_.lower_bound(start);
    if (access->writes) {
        while (piece != pieces_.end() && piece->first < end) {
            add_if_unordered(piece->second.write, clock, unordered);
            for (const AccessRef &read : piece->second.reads) add_if_unordered(read, clock, unordered);
            piece = pieces_.erase(piece);
        }
        piece = pieces_.emplace_hint(piece, start, Piece{end, access, {}});
    } else {
        for (uintptr_t at = start; at < end; ++piece) {
            if (piece == pieces_.end() || piece->first > at) {
                const uintptr_t next = piece == pieces_.end() ? end : std::min(end, piece->first);
                piece = pieces_.emplace_hint(piece, at, Piece{next, nullptr, {}});
            }
            Piece &here = piece->second;
            add_if_unordered(here.write, clock, unordered);
            if (here.write && here.write->known_to(common)) here.write = nullptr;
            drop_known(here.reads, clock);  // whoever comes behind this read comes behind those
            here.reads.push_back(access);
            at = here.end;
            piece = join_with_one_before(piece);
        }
        piece = std::prev(piece);
    }
    piece = join_with_one_before(piece);
    if (std::next(piece) != pieces_.end()) join_with_one_before(std::next(piece));
}

// Makes a border at an address.
void Shadow::split(uintptr_t at) {
    auto next = pieces_.lower_bound(at);
    if (next == pieces_.begin()) return;
    const auto before = std::prev(next);
    if (before->second.end <= at) return;
    pieces_.emplace_hint(next, at, before->second);
    before->second.end = at;
}

// Rows that meet, and layers that lie side by side, become one piece. Returns the piece that holds the given one's bytes.
Shadow::Pieces::iterator Shadow::join_with_one_before(Pieces::iterator piece) {
    if (piece == pieces_.begin()) return piece;
    const auto before = std::prev(piece);
    if (before->second.end != piece->first || before->second.write != piece->second.write ||
        before->second.reads != piece->second.reads)
        return piece;
    before->second.end = piece->second.end;
    pieces_.erase(piece);
    return before;
}

// Drops what whatever may still come is ordered behind. It looks at all pieces, and so is called when they have doubled.
void Shadow::forget(const Clock &common) {
    for (auto piece = pieces_.begin(); piece != pieces_.end();) {
        Piece &here = piece->second;
        if (here.write && here.write->known_to(common)) here.write = nullptr;
        drop_known(here.reads, common);
        piece = here.write || !here.reads.empty() ? std::next(piece) : pieces_.erase(piece);
    }
    kept_ = pieces_.size();
}

}  // namespace host_runtime
