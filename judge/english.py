"""Words that carry a sentence and no content, old forms included."""

_FUNCTION = """
a about above across after again against all am an and any are as at away be because been before
behind being below beneath beside between beyond both but by can could did do does down each
either ere every few for from had hath has have he her here hers him his how i if in into is it
its itself just like may me might mine more most much must my near neither no nor not now of off
on once one only onto or other our ours out over own shall she should so some such than that the
thee their them then there these they thine this those thou though through thus thy till to too
toward towards under until unto up upon us very was we were what when where whether which while
who whom whose why will with within without would yet you your yours i'm i'll i've i'd it's don't
let's that's you're can't isn't there's 'tis tis twas 'twas thyself doth dost hast shalt wilt ye
whilst art betwixt amidst naught nought aught hither thither whither whence wherefore
"""

FUNCTION_WORDS = frozenset(_FUNCTION.split())
